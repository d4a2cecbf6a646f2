"""Our evaluator and real vLLM agree: one exported draft, the same token-id prompts, greedy, one declared run.

    python scripts/bench_vllm.py --draft checkpoints/demo/export/vllm --output bench_vllm.json

The draft is an EAGLE-3 export (defaults: 64 prompts x 64 tokens, K = 3), Medusa heads (64 x 64, K = all heads) or a
small model's folder (32 x 48, K = 4).
Both sides ignore stop tokens and count accepted drafts per round that drafted (vLLM's num_drafts). Agreement: the 95%
interval (bootstrap over prompts, paired) of the relative difference of the acceptance length lies within +-5%, and
each position's acceptance within +-.04. The declaration is written before anything is measured; an existing output is
never overwritten. Exits with 1 on disagreement. vLLM lives in its own environment (`make engine-venv`). float32 is the
default: in bfloat16 the engines' texts part at ties, and acceptance is then that of different texts. About 15 minutes
on two CPU cores. The prompts may begin functions that the draft has seen: it is the difference that counts here.

On a CPU vLLM 0.32 plans the attention of a whole small model by the window of its first layer: where sliding and full
layers mix (Gemma 3), it accepts less beyond that window (512 tokens), its text being right. Prompts here end before it.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from drafttrain.cli import run_command
from drafttrain.data.files import write_json
from drafttrain.demo import demo_target
from drafttrain.demo_prompts import prompt_ids
from drafttrain.drafts.loading import draft_method, find_draft
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.agreement import (
    CRITERION,
    agreement,
    agreement_table,
    proposer_as_served,
)
from drafttrain.evaluate.engines import EngineError
from drafttrain.export.medusa import check_heads, check_target
from drafttrain.export.serve import check_engine
from drafttrain.export.serve_check import measure_ours, measure_vllm
from drafttrain.target import load_target

SEED = 1
DEFAULTS = {"kd": {"prompts": 32, "max_new_tokens": 48, "k": 4}}
OTHERWISE = {"prompts": 64, "max_new_tokens": 64, "k": 3}


def defaults(method: str, folder: Path, k: int | None) -> dict[str, int]:
    """The declared size where nothing is given; ExportError for drafts that vLLM does not serve, or not k of them."""
    check_engine("vllm", method, folder)
    if method != "medusa":
        return DEFAULTS.get(method, OTHERWISE)
    return OTHERWISE | {"k": check_heads(MedusaConfig.load(folder), k)}


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
    prompts: Annotated[int | None, typer.Option(help="How many prompts.", min=2)] = None,
    k: Annotated[int | None, typer.Option(help="Drafts a round.", min=1)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="New tokens for each prompt.", min=2)] = None,
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
    folder = find_draft(draft)
    method = draft_method(folder)
    given = {"prompts": prompts, "max_new_tokens": max_new_tokens, "k": k}
    size = defaults(method, folder, k) | {name: value for name, value in given.items() if value is not None}
    k, count = size["k"], size["max_new_tokens"]
    loaded = load_target(target or str(demo_target().folder), dtype=dtype)
    if method == "medusa":
        check_target(loaded)
    proposer = proposer_as_served(folder, loaded)
    declared = {
        "target": {"name": loaded.title, "fingerprint": loaded.fingerprint},
        **{"draft": str(draft), "method": method},
        **size,
        **{"prompt_seed": SEED, "temperature": 0.0, "dtype": dtype},
        "criterion": CRITERION,
        "command": " ".join(sys.argv),
    }
    write_json(output, {"declared": declared})
    print(f"declared in {output}: {json.dumps(declared)}", flush=True)
    ids = prompt_ids(loaded.tokenizer, size["prompts"], SEED)
    reference = measure_ours(loaded, ids, None, k, count, "plain") if plain else None
    ours = measure_ours(loaded, ids, proposer, k, count, f"{method} k={k}")
    report = measure_vllm(engine_python, loaded, folder, ids, k, count, reference["tokens"] if reference else None)
    result = agreement(ours, report["runs"][-1]["per_prompt"], k)
    result["beside"] = [texts(ours, report), *(beside(ours, reference, report) if reference else [])]
    per_prompt = {"ours": ours, "plain": reference}
    write_json(output, {"declared": declared, **result, "per_prompt": per_prompt, "report": report})
    Console(width=120).print(agreement_table(result, "vLLM"))
    for line in result["beside"]:
        print(line)
    print(f"{'agreement' if result['agrees'] else 'DISAGREEMENT'}; all figures in {output}")
    if not result["agrees"]:
        sys.exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
