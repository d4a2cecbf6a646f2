"""What each choice in training EAGLE-3 is worth on Gemma 3 270M: one change at a time, the same tokens, one seed.

    python scripts/bench_ablations.py                           # --data checkpoints/bench-quality shares its answers

Every variant trains the demo's draft for --tokens tokens, once through, in the same batches: losses, the draft
vocabulary, EAGLE-3.1's norms, the unroll, answers of the target against the files' own text, and a loss that begins one
token late. Then all of them draft for the same test prompts, greedy, at K = 4: acceptance length with its interval, and
the difference from the first row, prompts resampled in pairs. One seed: differences of a few hundredths are noise
(scripts/bench_peer.py shows what another seed does). Ends with the table in Markdown. What is done is kept in
results.json: run again to go on; --only NAME trains some. Four minutes a variant on two CPU cores.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from bench_kd import recipe_of, run_variant
from bench_peer import SAMPLINGS, batches_of, counts_of
from bench_quality import prepare_once, quality_recipe

from drafttrain.cli import quiet_libraries, run_command
from drafttrain.data.files import write_json
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.demo import demo_target
from drafttrain.demo_prompts import python_sources
from drafttrain.drafts import eagle3
from drafttrain.drafts.loading import load_draft
from drafttrain.evaluate.run import load_prompts
from drafttrain.evaluate.statistics import bootstrap_difference, bootstrap_ratio
from drafttrain.recipe import Recipe
from drafttrain.target import Target

BASE, RAW, LATE = "base", "raw text", "late mask"
LOSSES = ("reverse_kl", "jsd", "total_variation", "cross_entropy", "neg_log_alpha", "lk_hybrid")


def variants() -> dict[str, dict[str, dict[str, Any]]]:
    """{name: {section: changed settings}}; the first is the demo's own."""
    return {
        BASE: {},
        **{loss: {"training": {"loss": loss}} for loss in LOSSES},
        "draft_vocab 2048": {"data": {"draft_vocab": 2048}},
        "draft_vocab 32000": {"data": {"draft_vocab": 32_000}},
        "norm_output": {"draft": {"norm_output": True}},
        "fc_norm, norm_output (EAGLE-3.1)": {"draft": {"fc_norm": True, "norm_output": True}},
        "norm_before_fc": {"draft": {"norm_before_fc": True}},
        "ttt_steps 1": {"training": {"ttt_steps": 1}},
        "ttt_steps 7": {"training": {"ttt_steps": 7}},
        "step_decay 1": {"training": {"step_decay": 1.0}},
        LATE: {},
        RAW: {},
    }


def variant_recipe(target: Target, home: Path, answer: int, steps: int, changes: dict[str, dict]) -> Recipe:
    """The demo's recipe for so many steps with the changes merged into its sections; the last draft is kept."""
    base = quality_recipe(target, home / "prompts", 1.0, answer, []).model_dump(mode="json")
    fixed = dict.fromkeys(("eval_steps", "acceptance_steps", "save_steps", "max_steps"), steps)
    sections = {name: {**base[name], **values} for name, values in changes.items()}
    training = {**sections.pop("training", base["training"]), **fixed, "max_minutes": None}
    return recipe_of(base, {**sections, "training": training})


def raw_changes(home: Path, folder: Path, answer: int) -> dict[str, dict]:
    """Training on what the files say behind the prompts, about as long as the answers, in place of the answers."""
    texts, rows = dict(python_sources()), []
    for line in (home / "prompts" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        start = texts[row["file"]].index(row["prompt"])
        end = start + len(row["prompt"]) * (48 + answer) // 48
        rows.append({"prompt": row["prompt"], "completion": texts[row["file"]][start + len(row["prompt"]) : end]})
    path = folder / "raw.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entries = [{"path": str(path), "format": "prompt_completion"}]
    settings = quality_recipe_regenerate(answer) | {"splits": ["validation"]}
    return {"data": {"train": entries, "regenerate": settings}}


def quality_recipe_regenerate(answer: int) -> dict[str, Any]:
    """How answers are made in all other variants."""
    return {"max_new_tokens": answer, "temperature": [0.0, 0.8], "top_k": 50, "batch_size": 64}


@contextmanager
def late_mask(wanted: bool) -> Iterator[None]:
    """Rows count only from the first token of an answer on: the last token of the prompt, from which serving drafts
    first, is not trained.
    """
    own = eagle3.supervised_rows

    def late(loss_mask, steps):
        return own(loss_mask, steps) & loss_mask[None]

    eagle3.supervised_rows = late if wanted else own
    try:
        yield
    finally:
        eagle3.supervised_rows = own


def row_of(name: str, found: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """A line of the table: tau, and its difference from the base's."""
    low, high = bootstrap_ratio(found["accepted"], found["iterations"], offset=1.0)
    cells = [name, f"{tau(found):.2f} [{low:.2f}, {high:.2f}]"]
    if found is base:
        return [*cells, "", f"{found['minutes']:.1f}"]
    pairs = [found["accepted"], found["iterations"], base["accepted"], base["iterations"]]
    low, high = bootstrap_difference(*pairs)
    return [*cells, f"{tau(found) - tau(base):+.2f} [{low:+.2f}, {high:+.2f}]", f"{found['minutes']:.1f}"]


def tau(found: dict[str, Any]) -> float:
    """Acceptance length, pooled over the prompts."""
    return 1 + sum(found["accepted"]) / sum(found["iterations"])


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The table of all variants that are done, in their order."""
    head = ["changed", "tau at K = 4 [95%]", "less the first row [95%]", "minutes"]
    rows = [row_of(name, results[name], results[BASE]) for name in variants() if name in results]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(
    output: Annotated[Path, typer.Option(help="Folder of runs and results.")] = Path("checkpoints/bench-ablations"),
    data: Annotated[
        Path | None, typer.Option(help="Folder of prompts, answers and features. Default: --output's own.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Train these variants; may be given several times.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a run.", min=1000)] = 150_000,
    train_prompts: Annotated[int, typer.Option(help="Prompts that are answered for training.", min=8)] = 1200,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=8)] = 112,
    test_prompts: Annotated[int, typer.Option(help="Measured prompts.", min=2)] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)] = 64,
) -> None:
    """Train and measure the variants one after the other."""
    quiet_libraries()
    planned = variants()
    unknown = sorted(set(only or []) - set(planned))
    if unknown:
        raise RunError(f"--only is {', '.join(unknown)}. Expected some of {', '.join(planned)}.")
    target, output = demo_target(), output.absolute()
    home = (data or output).absolute()
    output.mkdir(parents=True, exist_ok=True)
    first = quality_recipe(target, home / "prompts", 1.0, answer_tokens, [])
    counts = {"train": train_prompts, "validation": 24, "test": test_prompts}
    prepared, base = prepare_once(target, first, home, counts)
    steps = len(batches_of(prepared.rows["train"], first.training.max_tokens_per_batch, 0, tokens))
    prompts = [list(one.ids) for one in load_prompts(first.data.test, target, first.data.chat, test_prompts, 0)]
    path = output / "results.json"
    asked = {"tokens": tokens, "answer": answer_tokens, "prompts": test_prompts, "new": max_new_tokens}
    kept = json.loads(path.read_text()) if path.exists() else {"asked": asked, "results": {}}
    if kept["asked"] != asked:
        raise RunError(f"{path} was measured with {kept['asked']}, {asked} is asked for. Mend: another --output.")
    for name in dict.fromkeys([BASE, *(only or planned)]):
        if name in kept["results"]:
            continue
        changes = raw_changes(home, output, answer_tokens) if name == RAW else planned[name]
        recipe = variant_recipe(target, home, answer_tokens, steps, changes)
        run, started = RunFolder(output / name.replace(" ", "-").replace(",", "")), time.monotonic()
        with late_mask(name == LATE):
            run_variant(run.path.name, recipe, base, output, target, same_features=name != RAW)
        minutes = (time.monotonic() - started) / 60
        found = counts_of(load_draft(run.path, target), target, prompts, SAMPLINGS["greedy"], max_new_tokens)
        kept["results"][name] = {**found, "minutes": minutes}
        write_json(path, kept)
        print(f"{name}: tau {tau(found):.3f}", flush=True)
    print(markdown(kept["results"]))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
