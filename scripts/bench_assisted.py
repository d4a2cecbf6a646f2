"""Our evaluator and transformers' assisted generation agree: one small draft, the same prompts, greedy, declared.

    python scripts/bench_assisted.py --draft checkpoints/kd/draft --output bench_assisted.json

transformers loads the folder by itself and drafts K tokens every round (num_assistant_tokens K, schedule "constant",
confidence threshold 0). Its first round follows the prompt where ours follows the prefill's token: it is given that
token with the prompt, and room for K more than are counted, because it drafts less near the end. So the rounds of both
are the same ones. A streamer tells what each round brought. Stop tokens are ordinary ones on both sides.

Agreement: the 95% interval (bootstrap over prompts, paired) of the relative difference of the acceptance length lies
within +-5%, and each position's acceptance within +-.04; every text, ours and theirs, is that of plain decoding
(float32), or leaves it where the target's two choices are at most 2 steps of the dtype apart (bfloat16). The
declaration is written before anything is measured; an existing output is never overwritten. Exits with 1 on
disagreement. Beside it: wall clock, all ways interleaved prompt by prompt, without a verdict (scripts/bench_loop.py
tells what of it is transformers' head on a CPU). A few minutes on two CPU cores.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafttrain.cli import run_command
from drafttrain.data.files import write_json
from drafttrain.data.progress import progress_bar
from drafttrain.demo import demo_target
from drafttrain.demo_prompts import prompt_ids
from drafttrain.drafts.base import DraftError, Proposer
from drafttrain.drafts.loading import draft_method, find_draft
from drafttrain.evaluate.agreement import (
    CRITERION,
    agreement,
    agreement_table,
    columns,
    decode_one,
    proposer_as_served,
)
from drafttrain.evaluate.divergence import first_divergence
from drafttrain.target import Target, load_target

SEED = 1
STEPS_WITHIN = {"float32": 0.0, "bfloat16": 2.0}
"""How far apart, in steps of the dtype, the target's two logits may lie where a text leaves plain decoding."""


class Deliveries:
    """A streamer for `generate` that notes when tokens arrive, and how many: the prompt first, then each round's."""

    def __init__(self):
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then once a round."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left to flush."""


def counted_rounds(delivered: Sequence[int], k: int, count: int) -> dict[str, Any]:
    """{draft_rounds, accepted, reached} of the rounds that began before `count` tokens were there; delivered: what each
    round brought behind the first token, its accepted drafts and one more."""
    there, accepted = 1, []
    for tokens in delivered:
        if there >= count:
            break
        assert 1 <= tokens <= k + 1, f"a round of {k} drafts brought {tokens} tokens"
        accepted.append(tokens - 1)
        there += tokens
    assert there >= count, f"{there} tokens arrived of {count}"
    reached = [sum(one > i for one in accepted) for i in range(k)]
    return {"draft_rounds": len(accepted), "accepted": sum(accepted), "reached": reached}


def load_assistant(folder: Path, target: Target, k: int) -> tuple[PreTrainedModel, str]:
    """The small model as transformers loads it, set to K drafts a round, and what its own generation config says."""
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype).to(target.device).eval()
    own = assistant.generation_config
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    given = {name: value for name, value in own.to_dict().items() if name in names and value is not None}
    shipped = ", ".join(f"{name} {value}" for name, value in given.items())
    own.num_assistant_tokens, own.num_assistant_tokens_schedule = k, "constant"
    own.assistant_confidence_threshold = 0.0
    # Neither looks for a stop (what the target leaves open, transformers takes from the assistant), nor takes a word of
    # the text for padding, as the assistant would.
    for settings in (own, target.model.generation_config):
        settings.eos_token_id = settings.pad_token_id = None
    return assistant, shipped or "transformers' own defaults"


def decode_assisted(
    target: Target, assistant: PreTrainedModel, prompt: Sequence[int], first: int, k: int, count: int
) -> dict[str, Any]:
    """The same row as `decode_one`, from transformers; first: the token that the target chooses after the prompt.

    whole: seconds from the call until `count` tokens are there.
    """
    ids = torch.tensor([[*prompt, first]], device=target.device)
    deliveries, start = Deliveries(), time.perf_counter()
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        do_sample=False,
        max_new_tokens=count - 1 + k,
        streamer=deliveries,
    )
    delivered = deliveries.counts[1:]
    counts = counted_rounds(delivered, k, count)
    return {
        "tokens": out[0, len(prompt) :].tolist()[:count],
        "whole": deliveries.times[counts["draft_rounds"]] - start,
        **counts,
    }


def measure(
    target: Target, prompts: Sequence[Sequence[int]], proposer: Proposer, assistant, k: int, count: int
) -> dict[str, dict[str, list]]:
    """Columns for plain, ours and theirs, prompt by prompt, the two drafting ways in turns, after a warm-up."""
    rows: dict[str, list] = {"plain": [], "ours": [], "theirs": []}
    decode_one(target, prompts[0], proposer, k, 8)
    decode_assisted(target, assistant, prompts[0], prompts[0][-1], k, 8)
    with progress_bar("decoding", len(prompts)) as update:
        for index, prompt in enumerate(prompts):
            plain = decode_one(target, prompt, None, k, count)
            ways = {
                "ours": lambda prompt=prompt: decode_one(target, prompt, proposer, k, count),
                "theirs": lambda prompt=prompt, first=plain["tokens"][0]: decode_assisted(
                    target, assistant, prompt, first, k, count
                ),
            }
            rows["plain"].append(plain)
            for name in list(ways)[:: 1 if index % 2 == 0 else -1]:
                rows[name].append(ways[name]())
            update(index + 1)
    return {name: columns(found) for name, found in rows.items()}


def compare_texts(
    target: Target, prompts: Sequence[Sequence[int]], sides: Mapping[str, Mapping[str, Sequence]], within: float
) -> dict[str, Any]:
    """First differences of ours and theirs from plain decoding, and whether all of them are ties (`is_tie`)."""
    found = []
    for name in ("ours", "theirs"):
        for index, prompt in enumerate(prompts):
            one = first_divergence(target, prompt, sides[name]["tokens"][index], sides["plain"]["tokens"][index])
            if one is not None:
                found.append({"side": name, "prompt": index, **one})
    return {"differences": found, "steps_within": within, "agrees": all(is_tie(one, within) for one in found)}


def is_tie(difference: Mapping[str, Any], within: float) -> bool:
    """Whether a first difference is a choice between logits at most so many steps of the dtype apart."""
    return difference["ulps"] is not None and abs(difference["ulps"]) <= within


def beside(sides: Mapping[str, Mapping[str, Sequence]], found: Mapping[str, Any], shipped: str) -> list[str]:
    """Texts and wall clock, for the reader."""
    count = len(sides["plain"]["tokens"])
    lines = [f"the folder's own generation config: {shipped}"]
    for name in ("ours", "theirs"):
        same = sum(a == b for a, b in zip(sides[name]["tokens"], sides["plain"]["tokens"], strict=True))
        lines.append(f"texts, {name}: {same} of {count} those of plain decoding")
    for one in found["differences"]:
        margin = "one text ends" if one["ulps"] is None else f"{one['ulps']:+.1f} steps of the dtype"
        lines.append(f"  {one['side']}, prompt {one['prompt']}, token {one['position']}: {margin}")
    # Theirs is given the first token.
    tokens = len(sides["plain"]["tokens"][0])
    ratios = [
        (theirs / (tokens - 1)) / (ours / tokens)
        for ours, theirs in zip(sides["ours"]["whole"], sides["theirs"]["whole"], strict=True)
    ]
    totals = {name: sum(side["whole"]) for name, side in sides.items()}
    lines.append(
        f"wall clock a token, whole calls: ours {statistics.median(ratios):.2f} times as fast as theirs (prompts "
        f"{min(ratios):.2f}..{max(ratios):.2f}); ours with the draft {totals['plain'] / totals['ours']:.2f} times our "
        "plain decoding"
    )
    return lines


def main(
    draft: Annotated[Path, typer.Option(help="The small model: a run, or a folder written by drafttrain export.")],
    target: Annotated[str | None, typer.Option(help="Hub id or folder. Default: the demo's Gemma 3 270M.")] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts.", min=2)] = 16,
    k: Annotated[int, typer.Option(help="Drafts a round.", min=1)] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=8)] = 64,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, on both sides.")] = "float32",
    output: Annotated[Path, typer.Option(help="The JSON to write; must not exist.")] = Path("bench_assisted.json"),
) -> None:
    """Measure the same small draft in our evaluator and in transformers, and compare acceptance and texts."""
    if output.exists() or not output.absolute().parent.exists():
        raise DraftError(
            f"--output {output} exists, or its folder does not; a declared run is made once, into a new file. Mend: "
            "give another --output"
        )
    if dtype not in STEPS_WITHIN:
        raise DraftError(f"--dtype is {dtype!r}; expected float32 or bfloat16. Mend: one of them")
    folder = find_draft(draft)
    if draft_method(folder) != "kd":
        raise DraftError(
            f"{draft} is a draft of kind {draft_method(folder)}; transformers assists with whole small models only. "
            "Mend: give the folder of one, or use scripts/bench_vllm.py"
        )
    loaded = load_target(target or str(demo_target().folder), dtype=dtype)
    proposer = proposer_as_served(folder, loaded)
    assistant, shipped = load_assistant(folder, loaded, k)
    declared = {
        "target": {"name": loaded.title, "fingerprint": loaded.fingerprint},
        "draft": str(draft),
        **{"prompts": prompts, "prompt_seed": SEED, "k": k, "max_new_tokens": max_new_tokens, "temperature": 0.0},
        "dtype": dtype,
        "criterion": CRITERION | {"text_steps_within": STEPS_WITHIN[dtype]},
        "command": " ".join(sys.argv),
    }
    write_json(output, {"declared": declared})
    print(f"declared in {output}: {json.dumps(declared)}", flush=True)
    ids = prompt_ids(loaded.tokenizer, prompts, SEED)
    sides = measure(loaded, ids, proposer, assistant, k, max_new_tokens)
    result = agreement(sides["ours"], sides["theirs"], k)
    result["texts"] = compare_texts(loaded, ids, sides, STEPS_WITHIN[dtype])
    result["beside"] = beside(sides, result["texts"], shipped)
    agrees = result["agrees"] = result["agrees"] and result["texts"]["agrees"]
    write_json(output, {"declared": declared, **result, "per_prompt": sides})
    Console(width=120).print(agreement_table(result, "transformers"))
    for line in result["beside"]:
        print(line)
    print(f"{'agreement' if agrees else 'DISAGREEMENT'}; all figures in {output}")
    if not agrees:
        sys.exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
