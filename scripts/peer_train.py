"""The other side of scripts/bench_peer.py: speculators 0.9.0's EAGLE-3 module, trained and saved by its own code.

Runs in .venv-peer (`make peer`), where this package is not: `.venv-peer/bin/python scripts/peer_train.py CASE`. CASE
names a data file, the order of its rows in batches, and the folder to write. Everything is the peer's default: Muon and
AdamW at 1e-3 with a linear decay to zero, three unroll steps of equal weight, KL, clipping at 1, head and embeddings
frozen, norm_before_fc, norm_before_residual and norm_output, bf16 autocast over fp32 weights (none where ours runs in
float32). Two things are put right for the target, and both favour the peer: the final norm's weight is the effective
one (Gemma multiplies by 1 + w, which the module does not), and batches are as small as ours. On CPUs it gets dense-mask
SDPA and its eager loss, as its flex attention and Triton loss are for CUDA.
"""

import json
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.config.schema import TrainConfig
from speculators.train.optimizers import build_optimizers
from transformers import LlamaConfig, get_linear_schedule_with_warmup


def build(case: dict) -> Eagle3DraftModel:
    """The module of the peer's defaults, with the target's table, head rows and effective final norm."""
    layer = LlamaConfig(**case["layer"])
    layer._attn_implementation = "sdpa"
    defaults = TrainConfig()
    steps = defaults.loss.ttt_steps
    speculators = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=case["architectures"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(case["draft_ids"]),
        norm_before_residual=defaults.draft.norm_before_residual,
        norm_before_fc=defaults.draft.norm_before_fc,
        norm_output=defaults.draft.norm_output,
        eagle_aux_hidden_state_layer_ids=case["feature_layers"],
        speculators_config=speculators,
    )
    torch.manual_seed(case["seed"])
    module = Eagle3DraftModel(config)
    ids = torch.tensor(case["draft_ids"])
    words = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    module.load_vocab_mappings(words, ids - torch.arange(len(ids)))
    target = load_file(case["target"])
    with torch.no_grad():
        module.embed_tokens.weight.copy_(target["embed_tokens"])
        module.lm_head.weight.copy_(target["head"])
        module.verifier_lm_head.weight.copy_(target["head"])
        module.verifier_norm.weight.copy_(target["final_norm"])
    return module


class Rows:
    """Rows of the data file, as the peer's own shift aligns them."""

    def __init__(self, path: str):
        self.file = safe_open(path, "pt")
        self.starts = self.file.get_tensor("starts").tolist()

    def row(self, index: int) -> dict[str, torch.Tensor]:
        start, end = self.starts[index : index + 2]
        names = {"input_ids": "input_ids", "loss_mask": "loss_mask", "features": "hidden_states"}
        names["last_hidden"] = "verifier_last_hidden_states"
        row = {theirs: self.file.get_slice(ours)[start:end] for ours, theirs in names.items()}
        row["lengths"] = torch.tensor([end - start])
        row["position_ids"] = torch.arange(end - start)
        return shift_batch(row)

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Rows one after the other, [1, T, ..], each a document of its own."""
        rows = [self.row(index) for index in indices]
        names = ("input_ids", "loss_mask", "hidden_states", "verifier_last_hidden_states", "position_ids")
        out = {name: torch.cat([row[name] for row in rows])[None] for name in names}
        counts = torch.tensor([len(row["input_ids"]) for row in rows])
        return out | {"document_ids": torch.arange(len(rows)).repeat_interleave(counts)[None]}


def main() -> None:
    """Train on all batches once, save, and print seconds, tokens and the last losses as JSON."""
    case = json.loads(Path(sys.argv[1]).read_text())
    module, rows, defaults = build(case), Rows(case["data"]), TrainConfig()
    group = defaults.optimizer
    settings = Namespace(**{name: getattr(group, name) for name in type(group).model_fields})
    optimizers = build_optimizers(module, settings)
    batches = case["batches"]
    schedules = [get_linear_schedule_with_warmup(one, len(batches) // 100, len(batches)) for one in optimizers]
    options = {
        "ttt_steps": defaults.loss.ttt_steps,
        "ttt_step_loss_decay": defaults.loss.ttt_step_loss_decay,
        "loss_config": resolve_loss_config(defaults.loss.loss_fn, "eager"),
    }
    module.train()
    started, losses, tokens = time.perf_counter(), [], 0
    for number, indices in enumerate(batches):
        batch = rows.batch(indices)
        with torch.autocast("cpu", torch.bfloat16, enabled=case["bf16"]):
            _, loss, _ = module(**batch, **options)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for one in (*optimizers, *schedules):
            one.step()
        losses.append(float(loss.detach()))
        tokens += sum(rows.starts[i + 1] - rows.starts[i] for i in indices)
        if number % 20 == 0:
            print(f"peer: step {number + 1} of {len(batches)}, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    # As its checkpointer writes them: everything in bf16.
    state = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in module.state_dict().items()}
    module.save_pretrained(case["output"], state_dict=state)
    print(json.dumps({"seconds": seconds, "tokens": tokens, "steps": len(batches), "losses": losses[-5:]}))


if __name__ == "__main__":
    main()
