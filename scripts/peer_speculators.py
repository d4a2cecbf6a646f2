"""The other side of scripts/bench_train.py: a training step of the EAGLE-3 module of speculators 0.9.0, timed.

Runs in .venv-peer (`make peer`), where this package is not: `.venv-peer/bin/python scripts/peer_speculators.py CASE`.
The module is used as its own trainer uses it: forward with the target's last states, which gives targets over the draft
vocabulary and the loss of all unroll steps. Its head, frozen by default, is trained here, as ours is. On CPUs it gets
dense-mask SDPA and its eager loss, since its own flex attention and Triton loss are for CUDA, where they are used.
"""

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from step_timing import answer, random_rows, take_steps, train_step
from transformers import LlamaConfig


def build(case: dict) -> Eagle3DraftModel:
    """The module with random weights in place of the not-a-number ones that it waits to have loaded."""
    layer = LlamaConfig(
        hidden_size=case["hidden"],
        intermediate_size=case["intermediate"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        vocab_size=case["vocab"],
        num_hidden_layers=1,
        max_position_embeddings=8192,
    )
    layer._attn_implementation = "simple_flex_attention" if case["device"] == "cuda" else "sdpa"
    proposal = GreedyTokenProposalConfig(speculative_tokens=case["unroll"])
    speculators = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[proposal],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=case["words"],
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=speculators,
    )
    torch.manual_seed(0)
    module = Eagle3DraftModel(config)
    words = torch.arange(case["vocab"]) < case["words"]
    module.load_vocab_mappings(words, torch.zeros(case["words"], dtype=torch.long))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    module.lm_head.weight.requires_grad_(True)
    return module.to(case["device"])


def side(case: dict) -> dict:
    """Seconds, bytes and loss; trained: parameters."""
    module, rows = build(case), random_rows(case)
    T, device = case["tokens"], case["device"]
    losses = resolve_loss_config("kl_div", "fused" if device == "cuda" else "eager")
    inputs = {
        "hidden_states": rows["features"],
        "input_ids": rows["input_ids"],
        "document_ids": torch.zeros(1, T, dtype=torch.long, device=device),
        "loss_mask": torch.ones(1, T, dtype=torch.bool, device=device),
        "verifier_last_hidden_states": rows["last_hidden"],
    }

    def loss_of() -> torch.Tensor:
        return module(**inputs, ttt_steps=case["unroll"], ttt_step_loss_decay=0.8, loss_config=losses)[1]

    found = take_steps(train_step(module, loss_of, case), case)
    return found | {"trained": sum(p.numel() for p in module.parameters() if p.requires_grad)}


if __name__ == "__main__":
    answer(side)
