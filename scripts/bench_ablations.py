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
from bench_kd import check_only, recipe_of, run_variant
from bench_peer import (
    SAMPLINGS,
    AnswerTokens,
    Data,
    NewTokens,
    Ready,
    TestPrompts,
    Tokens,
    TrainPrompts,
    counts_of,
    tau,
)
from bench_quality import quality_recipe

from drafttrain.cli import quiet_libraries, run_command
from drafttrain.data.files import write_json
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.demo_prompts import python_sources
from drafttrain.drafts import eagle3
from drafttrain.drafts.loading import load_draft
from drafttrain.evaluate.statistics import bootstrap_difference, bootstrap_ratio
from drafttrain.recipe import Recipe, RegenerateConfig
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


def raw_changes(home: Path, folder: Path, regenerate: RegenerateConfig) -> dict[str, dict]:
    """Training on what the files say behind the prompts, about as long as the answers, in place of the answers.
    regenerate: how those are made, as validation's still are.
    """
    answer = regenerate.max_new_tokens
    texts, rows = dict(python_sources()), []
    for line in (home / "prompts" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        start = texts[row["file"]].index(row["prompt"])
        end = start + len(row["prompt"]) * (48 + answer) // 48
        rows.append({"prompt": row["prompt"], "completion": texts[row["file"]][start + len(row["prompt"]) : end]})
    path = folder / "raw.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entries = [{"path": str(path), "format": "prompt_completion"}]
    settings = regenerate.model_dump(mode="json") | {"splits": ["validation"]}
    return {"data": {"train": entries, "regenerate": settings}}


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


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The table of all variants that are done, in their order."""
    head = ["changed", "tau at K = 4 [95%]", "less the first row [95%]", "minutes"]
    rows = [row_of(name, results[name], results[BASE]) for name in variants() if name in results]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(
    output: Annotated[Path, typer.Option(help="Folder of runs and results.")] = Path("checkpoints/bench-ablations"),
    data: Data = None,
    only: Annotated[list[str] | None, typer.Option(help="Train these variants; may be given several times.")] = None,
    tokens: Tokens = 150_000,
    train_prompts: TrainPrompts = 1200,
    answer_tokens: AnswerTokens = 112,
    test_prompts: TestPrompts = 64,
    max_new_tokens: NewTokens = 64,
) -> None:
    """Train and measure the variants one after the other."""
    quiet_libraries()
    planned = variants()
    check_only(only, planned)
    output = output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    ready = Ready.make((data or output).absolute(), train_prompts, answer_tokens, test_prompts)
    target, steps = ready.target, len(ready.batches(0, tokens))
    path = output / "results.json"
    asked = {"tokens": tokens, "answer": answer_tokens, "prompts": test_prompts, "new": max_new_tokens}
    kept = json.loads(path.read_text()) if path.exists() else {"asked": asked, "results": {}}
    if kept["asked"] != asked:
        raise RunError(f"{path} was measured with {kept['asked']}, {asked} is asked for. Mend: another --output.")
    for name in dict.fromkeys([BASE, *(only or planned)]):
        if name in kept["results"]:
            continue
        changes = raw_changes(ready.home, output, ready.recipe.data.regenerate) if name == RAW else planned[name]
        recipe = variant_recipe(target, ready.home, answer_tokens, steps, changes)
        run, started = RunFolder(output / name.replace(" ", "-").replace(",", "")), time.monotonic()
        with late_mask(name == LATE):
            run_variant(run.path.name, recipe, ready.base, output, target, same_features=name != RAW)
        minutes = (time.monotonic() - started) / 60
        found = counts_of(load_draft(run.path, target), target, ready.prompts, SAMPLINGS["greedy"], max_new_tokens)
        kept["results"][name] = {**found, "minutes": minutes}
        write_json(path, kept)
        print(f"{name}: tau {tau(found):.3f}", flush=True)
    print(markdown(kept["results"]))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
