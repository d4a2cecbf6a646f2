"""Our evaluator and real vLLM agree: one exported EAGLE-3 draft, the same token-id prompts, greedy, one declared run.

    python scripts/bench_vllm.py --draft checkpoints/demo/export/vllm --output bench_vllm.json

Both sides ignore stop tokens and count accepted drafts per round that drafted (vLLM's num_drafts). Agreement: the 95%
interval (bootstrap over prompts, paired) of the relative difference of the acceptance length lies within +-5%, and
each position's acceptance within +-.04. The declaration is written before anything is measured; an existing output is
never overwritten. Exits with 1 on disagreement. vLLM lives in its own environment (`make engine-venv`). float32 is the
default: in bfloat16 the engines' texts part at ties, and acceptance is then that of different texts. About 15 minutes
on two CPU cores. The prompts may begin functions that the draft has seen: it is the difference that counts here.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from drafttrain.cli import run_command
from drafttrain.data.files import write_json
from drafttrain.data.progress import progress_bar
from drafttrain.demo import demo_target
from drafttrain.demo_prompts import write_prompts
from drafttrain.drafts.base import Proposer
from drafttrain.drafts.loading import find_draft, load_draft
from drafttrain.evaluate.engines import EngineDraft, EngineError, evaluate_vllm
from drafttrain.evaluate.statistics import bootstrap_speedup
from drafttrain.export.eagle3 import VLLM_WITHOUT_HOOKS
from drafttrain.specdec.decode import generate
from drafttrain.target import Target, load_target

TAU_WITHIN = 0.05  # relative
POSITION_WITHIN = 0.04
SEED = 1


def agreement(ours: Mapping[str, Sequence], theirs: Mapping[str, Sequence], k: int) -> dict[str, Any]:
    """Differences (theirs less ours) and the verdict, from per-prompt draft_rounds, accepted and reached[position]."""
    sides = [_pooled(side, k) for side in (ours, theirs)]
    relative = sides[1]["tau"] / sides[0]["tau"] - 1
    # tau is a ratio of sums, (rounds + accepted) / rounds, so the ratio of two taus is bootstrapped like a speedup.
    columns = [[_tokens(side), side["draft_rounds"]] for side in (theirs, ours)]
    interval = bootstrap_speedup(*columns[0], *columns[1])
    bounds = None if interval is None else [bound - 1 for bound in interval]
    positions = [b - a for a, b in zip(*(side["per_position"] for side in sides), strict=True)]
    tau_agrees = bounds is not None and -TAU_WITHIN <= bounds[0] <= bounds[1] <= TAU_WITHIN
    return {
        "ours": sides[0],
        "vllm": sides[1],
        "tau": {"relative_difference": relative, "interval": bounds, "within": TAU_WITHIN, "agrees": tau_agrees},
        "positions": [
            {"difference": found, "within": POSITION_WITHIN, "agrees": abs(found) <= POSITION_WITHIN}
            for found in positions
        ],
        "agrees": tau_agrees and all(abs(found) <= POSITION_WITHIN for found in positions),
    }


def _tokens(side: Mapping[str, Sequence]) -> list[int]:
    return [rounds + accepted for rounds, accepted in zip(side["draft_rounds"], side["accepted"], strict=True)]


def _pooled(side: Mapping[str, Sequence], k: int) -> dict[str, Any]:
    rounds = sum(side["draft_rounds"])
    reached = [sum(row[i] for row in side["reached"] if i < len(row)) for i in range(k)]
    return {
        "draft_rounds": rounds,
        "accepted": sum(side["accepted"]),
        "tau": 1 + sum(side["accepted"]) / rounds,
        "per_position": [count / rounds for count in reached],
    }


def make_prompts(target: Target, count: int) -> list[list[int]]:
    """Starts of functions of the standard library as token ids, the BOS included."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder), target.tokenizer, {"test": count}, seed=SEED)
        rows = (Path(folder) / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [list(target.tokenizer(json.loads(row)["prompt"])["input_ids"]) for row in rows]


def measure_ours(target: Target, prompts, proposer: Proposer | None, k: int, count: int, label: str) -> dict[str, list]:
    """Per prompt: tokens, decoded, seconds, draft_rounds, accepted, reached; one prompt at a time, stops ignored."""
    out: dict[str, list] = {
        name: [] for name in ("tokens", "decoded", "seconds", "draft_rounds", "accepted", "reached")
    }
    with progress_bar("ours", len(prompts)) as update:
        generate(target, prompts[:1], proposer, k=k, max_new_tokens=8, stop_ids=())
        for index, prompt in enumerate(prompts):
            update(index, label)
            done = generate(target, [prompt], proposer, k=k, max_new_tokens=count, stop_ids=())
            counts = done.counts
            out["tokens"].append(list(done.generations[0].tokens))
            out["decoded"].append(counts.emitted - 1)
            out["seconds"].append(done.seconds.decode)
            out["draft_rounds"].append(counts.draft_rounds)
            out["accepted"].append(counts.accepted)
            out["reached"].append(list(counts.reached))
        update(len(prompts), label)
    return out


def measure_vllm(
    python: Path, target: Target, draft: Path, prompts, k: int, count: int, plain_tokens
) -> dict[str, Any]:
    """vLLM's report on the same prompts: its plain run where ours are given, then the draft's."""
    with progress_bar("vLLM", (2 if plain_tokens else 1) * len(prompts)) as update:
        report = evaluate_vllm(
            python,
            target.folder,
            [EngineDraft("eagle3", draft.resolve())],
            prompts,
            k=[k],
            max_new_tokens=count,
            dtype=str(target.dtype).removeprefix("torch."),
            plain=plain_tokens is not None,
            model_impl="transformers" if target.config.model_type in VLLM_WITHOUT_HOOKS else "auto",
            target_name=target.title,
            fingerprint=target.fingerprint,
            plain_tokens=plain_tokens,
            progress=update,
        )
    if report["interrupted"]:
        raise EngineError(f"vLLM ended early, nothing is compared: {report['interruption']}")
    return report


def print_result(result: Mapping[str, Any]) -> None:
    """One row for each figure, the verdict last."""
    table = Table("figure", "ours", "vLLM", "difference", "allowed", "")
    tau, ours, theirs = result["tau"], result["ours"], result["vllm"]
    bounds = "" if tau["interval"] is None else " [{:+.2%}, {:+.2%}]".format(*tau["interval"])
    table.add_row(
        "acceptance length",
        f"{ours['tau']:.3f}",
        f"{theirs['tau']:.3f}",
        f"{tau['relative_difference']:+.2%}{bounds}".replace("[", r"\["),
        f"interval within {TAU_WITHIN:.0%}",
        "agrees" if tau["agrees"] else "DISAGREES",
    )
    for i, position in enumerate(result["positions"]):
        table.add_row(
            f"accepted at position {i + 1}",
            f"{ours['per_position'][i]:.3f}",
            f"{theirs['per_position'][i]:.3f}",
            f"{position['difference']:+.3f}",
            f"{POSITION_WITHIN:g}",
            "agrees" if position["agrees"] else "DISAGREES",
        )
    Console(width=120).print(table)
    for line in result["beside"]:
        print(line)


def texts(ours: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """How many of the drafted texts are the same in both."""
    theirs = report["runs"][-1]["per_prompt"]["tokens"]
    same = sum(list(a) == list(b) for a, b in zip(ours["tokens"], theirs, strict=True))
    return f"drafted texts: {same} of {len(theirs)} the same in both"


def beside(ours: Mapping[str, Any], plain: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """Speeds and texts, for the reader; the verdict does not depend on them."""

    def rate(side: Mapping[str, Any]) -> float:
        return sum(side["decoded"]) / sum(side["seconds"])

    baseline, drafted = report["runs"]
    agreed = baseline["against_ours"]
    return [
        f"speedup over the same engine's plain decoding: ours {rate(ours) / rate(plain):.2f}x, "
        f"vLLM {drafted['speedup']:.2f}x",
        f"plain tokens/s: ours {rate(plain):.1f}, vLLM {rate(baseline['per_prompt']):.1f}",
        f"plain texts: {agreed['identical']} of {agreed['compared']} the same in both engines; with the draft, "
        f"{len(drafted['divergences'])} of vLLM's leave its own plain text (bf16 ties)",
    ]


def main(
    draft: Annotated[Path, typer.Option(help="The exported draft: a folder written by drafttrain export.")],
    target: Annotated[str | None, typer.Option(help="Hub id or folder. Default: the demo's Gemma 3 270M.")] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts.", min=2)] = 64,
    k: Annotated[int, typer.Option(help="Drafts a round.", min=1)] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)] = 64,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, on both sides.")] = "float32",
    plain: Annotated[bool, typer.Option(help="Plain decoding in both too: speedups, and the plain texts.")] = True,
    engine_python: Annotated[Path, typer.Option(help="vLLM's Python.")] = Path(".venv-engines/bin/python"),
    output: Annotated[Path, typer.Option(help="The JSON to write; must not exist.")] = Path("bench_vllm.json"),
) -> None:
    """Measure the same draft in our evaluator and in vLLM, and compare acceptance."""
    if output.exists():
        raise EngineError(f"{output} exists; a declared run is made once. Mend: give another --output, or move it away")
    for path, what in ((engine_python, "vLLM's Python (make engine-venv)"), (output.absolute().parent, "a folder")):
        if not path.exists():
            raise EngineError(f"{path} is not there; expected {what}")
    loaded = load_target(target or str(demo_target().folder), dtype=dtype)
    proposer = load_draft(draft, loaded, loaded.dtype).proposer(loaded)
    declared = {
        "target": {"name": loaded.title, "fingerprint": loaded.fingerprint},
        "draft": str(draft),
        **{"prompts": prompts, "prompt_seed": SEED, "k": k, "max_new_tokens": max_new_tokens, "temperature": 0.0},
        "dtype": dtype,
        "criterion": {"tau_interval_within": TAU_WITHIN, "positions_within": POSITION_WITHIN},
        "command": " ".join(sys.argv),
    }
    write_json(output, {"declared": declared})
    print(f"declared in {output}: {json.dumps(declared)}", flush=True)
    ids = make_prompts(loaded, prompts)
    reference = measure_ours(loaded, ids, None, k, max_new_tokens, "plain") if plain else None
    ours = measure_ours(loaded, ids, proposer, k, max_new_tokens, f"eagle3 k={k}")
    tokens = reference["tokens"] if reference else None
    report = measure_vllm(engine_python, loaded, find_draft(draft), ids, k, max_new_tokens, tokens)
    result = agreement(ours, report["runs"][-1]["per_prompt"], k)
    result["beside"] = [texts(ours, report), *(beside(ours, reference, report) if reference else [])]
    per_prompt = {"ours": ours, "plain": reference}
    write_json(output, {"declared": declared, **result, "per_prompt": per_prompt, "report": report})
    print_result(result)
    print(f"{'agreement' if result['agrees'] else 'DISAGREEMENT'}; all figures in {output}")
    if not result["agrees"]:
        sys.exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
