"""Our side of scripts/bench_train.py: a training step of an EAGLE-3 draft, or the attention of its unroll, timed.

`python scripts/train_step.py CASE`, CASE a JSON object as bench_train makes them; "part" says what is run: step,
attention, or "dense attention", which is scaled-dot-product attention over all keys with a mask [T, (s + 1) T].
"""

import statistics
import time

import torch
import torch.nn.functional as F
from step_timing import answer, random_rows, take_steps, train_step
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.data.features import teacher_statistics
from drafttrain.drafts.base import Batch
from drafttrain.drafts.loading import new_draft
from drafttrain.nn.ttt_attention import ttt_attention
from drafttrain.recipe import parse_recipe
from drafttrain.target import Target

LAYERS = [1, 2, 3]
RATE_SIZE, RATE_TRIES = 2048, 5


def tiny_target(case: dict) -> Target:
    """A target of the case's width and vocabulary with next to nothing in its layers, which no step runs."""
    config = LlamaConfig(
        hidden_size=case["hidden"],
        vocab_size=case["vocab"],
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(case["device"], getattr(torch, case["dtype"]))
    return Target.from_model(model, name="a target of random weights")


def new_module(case: dict, target: Target):
    """The draft as training builds one."""
    recipe = parse_recipe(
        {
            "method": "eagle3",
            "target": {"name_or_path": "random/weights"},
            "data": {"train": [{"path": "none.jsonl"}], "draft_vocab": case["words"]},
            "draft": {
                "num_attention_heads": case["heads"],
                "num_key_value_heads": case["kv_heads"],
                "head_dim": case["head_dim"],
                "intermediate_size": case["intermediate"],
            },
            "training": {"ttt_steps": case["unroll"]},
        }
    )
    H = case["hidden"]
    statistics_of = {"feature_rms": torch.ones(3 * H), "final_rms": torch.ones(H)}
    return new_draft(recipe, target, LAYERS, torch.arange(case["words"]), statistics_of)


def make_batch(case: dict, target: Target) -> tuple[Batch, float]:
    """The random rows with the full vocabulary's statistics, and the seconds that those took."""
    rows = random_rows(case)
    T, device = case["tokens"], case["device"]
    start = time.perf_counter()
    with torch.no_grad():
        lse, choice = teacher_statistics(target.head(), rows["last_hidden"][0])
    float(lse[-1])  # Waits for a device.
    seconds = time.perf_counter() - start
    batch = Batch(
        input_ids=rows["input_ids"],
        loss_mask=torch.ones(1, T, dtype=torch.bool, device=device),
        lengths=torch.tensor([T], device=device),
        labels=rows["input_ids"],
        index=torch.zeros(1, dtype=torch.long, device=device),
        features=rows["features"],
        last_hidden=rows["last_hidden"],
        target_lse=lse[None],
        target_argmax=choice[None],
    )
    return batch, seconds


def step_side(case: dict) -> dict:
    """Seconds, bytes and loss; statistics_seconds: of the inputs; rate: FLOP/s of a matrix product, measured after."""
    target = tiny_target(case)
    draft = new_module(case, target).train()
    batch, seconds = make_batch(case, target)

    def loss_of() -> torch.Tensor:
        return draft(batch).objective / case["tokens"]

    found = take_steps(train_step(draft, loss_of, case), case)
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    return found | {"trained": trained, "statistics_seconds": seconds, "rate": product_rate(case)}


def product_rate(case: dict) -> float:
    """FLOP/s of the faster of two products in the case's dtype: square ones, and the draft head's own."""
    dtype = getattr(torch, case["dtype"])
    shapes = [(RATE_SIZE, RATE_SIZE, RATE_SIZE), (case["tokens"], case["hidden"], case["words"])]
    best = 0.0
    for rows, inner, columns in shapes:
        a = torch.randn(rows, inner, device=case["device"]).to(dtype)
        b = torch.randn(columns, inner, device=case["device"]).to(dtype)
        out = torch.empty(rows, columns, device=case["device"], dtype=dtype)
        seconds = []
        for _ in range(1 + RATE_TRIES):
            start = time.perf_counter()
            torch.mm(a, b.t(), out=out)
            if case["device"] == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        best = max(best, 2 * rows * inner * columns / statistics.median(seconds[1:]))
    return best


def attention_inputs(case: dict) -> tuple[list[torch.Tensor], ...]:
    """Queries [1, nh, T, D], keys and values [1, nkv, T, D] of every unroll step, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    dtype, T, D = getattr(torch, case["dtype"]), case["tokens"], case["head_dim"]

    def draw(heads: int) -> list[torch.Tensor]:
        shape = (1, heads, T, D)
        drawn = [torch.randn(shape, generator=generator).to(case["device"], dtype) for _ in range(case["unroll"])]
        return [tensor.requires_grad_() for tensor in drawn]

    return draw(case["heads"]), draw(case["kv_heads"]), draw(case["kv_heads"])


def dense_attention(query, keys, values, mask: torch.Tensor) -> torch.Tensor:
    """Softmax attention over the keys of all steps so far, [1, nkv, (s + 1) T, D] put together."""
    key, value = torch.cat(keys, 2), torch.cat(values, 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def dense_mask(T: int, step: int, device: str) -> torch.Tensor:
    """bool [T, (step + 1) T]: a causal block, then a diagonal for each later step."""
    own = [torch.eye(T, dtype=torch.bool, device=device)] * step
    return torch.cat([torch.ones(T, T, dtype=torch.bool, device=device).tril(), *own], 1)


def unrolled(case: dict, inputs, dense: bool) -> list[torch.Tensor]:
    """The attention output of every unroll step."""
    queries, keys, values = inputs
    out = []
    for s, query in enumerate(queries):
        if dense:
            mask = dense_mask(case["tokens"], s, case["device"])
            out.append(dense_attention(query, keys[: s + 1], values[: s + 1], mask))
        else:
            out.append(ttt_attention(query, keys[0], values[0], keys[1 : s + 1], values[1 : s + 1]))
    return out


def attention_side(case: dict) -> dict:
    """Forward and backward of all unroll steps."""
    inputs = attention_inputs(case)
    weights = torch.randn(case["tokens"], case["head_dim"], device=case["device"]).to(inputs[0][0].dtype)

    def step() -> float:
        out = sum((o * weights).sum(dtype=torch.float32) for o in unrolled(case, inputs, "dense" in case["part"]))
        out.backward()
        for tensor in [tensor for group in inputs for tensor in group]:
            tensor.grad = None
        return float(out.detach())

    return take_steps(step, case)


def side(case: dict) -> dict:
    """What the case's part asks for."""
    return step_side(case) if case["part"] == "step" else attention_side(case)


if __name__ == "__main__":
    answer(side)
