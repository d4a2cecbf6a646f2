"""The model card of an export, README.md: how to serve the draft, what it was measured at, trained on and made for.

Everything in it is read from the run's own files; what they do not say is said to be not known.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCardData, metadata_load

from drafttrain import __version__
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.base import Draft, read_facts
from drafttrain.evaluate.report_summary import complete, interval_of, number, output_text, percent, sampling_title
from drafttrain.evaluate.report_words import certificate_words
from drafttrain.export.gguf_header import gguf_text
from drafttrain.export.serve import serve_lines
from drafttrain.recipe import Recipe
from drafttrain.target import Target
from drafttrain.target_files import STORED_DTYPES, read_header, read_json

FILE = "README.md"
NOT_KNOWN = "not known"
LIBRARIES = {"eagle3": "drafttrain", "medusa": "drafttrain", "kd": "transformers"}
TAGS = {"eagle3": "eagle3", "medusa": "medusa", "kd": "distillation"}
SHOWN = ("method", "draft", "features", "training")


@dataclass(frozen=True)
class Source:
    """What is known of a draft: its run, the run's recipe and data, and drafttrain.json. Empty for a bare folder."""

    run: RunFolder | None
    recipe: Recipe | None
    manifest: dict[str, Any]
    facts: dict[str, Any]

    @classmethod
    def of(cls, draft_folder: Path) -> "Source":
        path = draft_folder / "drafttrain.json"
        facts = read_facts(path) if path.exists() else {}
        run = RunFolder(draft_folder.parent)
        if draft_folder.name != run.draft.name or not run.recipe_file.exists():
            return cls(None, None, {}, facts)
        manifest = run.prepared / "manifest.json"
        return cls(run, run.recipe(), json.loads(manifest.read_text()) if manifest.exists() else {}, facts)


def write_card(folder: Path, place: Path, draft: Draft, draft_folder: Path, target: Target, k: int) -> None:
    """Write README.md into the export in `folder`, which will lie at `place`, of the draft in `draft_folder`."""
    source = Source.of(draft_folder)
    newest = newest_report(source, draft.method, draft_folder)
    report = newest[1] if newest else None
    name = (source.facts.get("tuned_from") or {}).get("name") or target.title
    data = source.recipe.data if source.recipe else None
    front = ModelCardData(
        base_model=name,
        license=_licence(source, target),
        library_name=LIBRARIES[draft.method],
        pipeline_tag="text-generation",
        tags=["speculative-decoding", TAGS[draft.method]],
        datasets=[entry.dataset for entry in data.train if entry.dataset] or None if data else None,
    )
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = resources.files("drafttrain.export").joinpath("card.md.j2").read_text(encoding="utf-8")
    text = environment.from_string(template).render(
        front=front.to_yaml() + "\n",
        title=f"{_kind(draft)} for {name}",
        summary=_summary(draft, name, source, k),
        serve=list(serve_lines(target, folder, place, k, draft.method)),
        report=report_words(report) if report else None,
        unmeasured=_unmeasured(source),
        training=list(_training(source, target)),
        recipe=_settings(source.recipe),
        limits=list(_limits(draft, folder, source, target, report)),
        licences=list(_licences(source, target)),
        version=__version__,
    )
    (folder / FILE).write_text(text, encoding="utf-8")


def newest_report(source: Source, method: str, draft_folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The run's newest report.json about the draft as it is now (later than its weights, of its own target), and what
    it says of this draft and of n-gram lookup.
    """
    if source.run is None:
        return None
    made = max((path.stat().st_mtime for path in draft_folder.glob("*.safetensors")), default=0.0)
    paths = sorted(source.run.path.glob("evaluation/*/report.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(paths):
        report = read_json(path, "evaluate the run again")
        fits = report.get("schema") == 1 and path.stat().st_mtime >= made
        same = (report.get("target") or {}).get("fingerprint") == source.facts.get("target_fingerprint")
        if fits and same and any(_is_ours(run, method, draft_folder) for run in report["runs"]):
            report["runs"] = [
                run for run in report["runs"] if run["draft"] == "ngram" or _is_ours(run, method, draft_folder)
            ]
            return path, report
    return None


def _is_ours(run: dict[str, Any], method: str, draft_folder: Path) -> bool:
    """Whether a row of a report is about the trained draft of that folder, wherever the run was moved to."""
    where = run.get("checkpoint")
    if run["draft"] != method or run.get("trained") is not True or where is None:
        return False
    return Path(where).resolve().parts[-2:] == draft_folder.resolve().parts[-2:]


def report_words(report: dict[str, Any]) -> dict[str, Any]:
    """{"where", "rows": lists of cells, "certificate"} of a report."""
    full = complete(report)
    device, prompts, engine = full["device"], full["prompts"], full.get("engine") or {}
    program = " ".join(filter(None, (engine.get("name"), engine.get("version")))) or "drafttrain's own loop"
    where = (
        f"Measured by {program} on {prompts['count']} prompts ({prompts['name']}), {prompts['max_new_tokens']} new "
        f"tokens each, on {device['name']} in {device['dtype']}."
    )
    if prompts["train_overlap"] is not None:
        where += f" {percent(prompts['train_overlap'])} of the prompts overlap with the training data."
    words = certificate_words(full["certificate"])
    return {
        "where": where,
        "rows": [_row(run) for run in full["runs"]],
        "certificate": words["line"] if words else "none with this report",
    }


def _row(run: dict[str, Any]) -> list[str]:
    return [
        run["label"].replace("|", "\\|"),
        sampling_title(run),
        str(run["concurrency"] or 1),
        number(run["mean_acceptance_length"], 3) + _interval(run, "mean_acceptance_length"),
        " ".join(number(value, 3) for value in run["per_position_acceptance"] or ()),
        percent(run["acceptance_rate"]),
        number(run["speedup"], 2, "x") + _interval(run, "speedup"),
        output_text(run),
    ]


def _interval(run: dict[str, Any], key: str) -> str:
    pair = interval_of(run, key)
    return f" [{pair[0]:.2f}, {pair[1]:.2f}]" if pair else ""


def _unmeasured(source: Source) -> str:
    if source.run is None:
        return "Exported from a draft folder alone: no evaluation report was at hand."
    if list(source.run.path.glob("evaluation/*/report.json")):
        return "Not measured: the run's reports are older than this draft, or about another."
    return "Not measured: the run has no evaluation report. `drafttrain evaluate` writes one."


def _kind(draft: Draft) -> str:
    kinds = {"eagle3": "EAGLE-3 draft", "medusa": "Medusa heads", "kd": "Small draft model"}
    return kinds[draft.method]


def _summary(draft: Draft, name: str, source: Source, k: int) -> str:
    """What it is, by kind."""
    if draft.method == "kd":
        layers = draft.shape.num_hidden_layers
        return f"A causal language model of {layers} layers that drafts tokens for {name}, which verifies every one."
    if draft.method == "eagle3":
        layers = ", ".join(f"hs[{layer}]" for layer in draft.feature_layers)
        what = f"An EAGLE-3 module that drafts tokens for {name} from {layers}, its hidden states after so many layers."
    else:
        what = f"{k} Medusa heads that draft tokens for {name} from its last hidden state."
    if source.facts.get("tuned_from"):
        what += " The target was tuned together with them: they are served with that tuned model only."
    return what + " They are no language model by themselves; the target verifies every token."


def _training(source: Source, target: Target) -> Iterator[str]:
    facts, manifest, recipe = source.facts, source.manifest, source.recipe
    yield f"Target: {target.title}, fingerprint sha256 {facts.get('target_fingerprint') or NOT_KNOWN}."
    yield f"Tokenizer: sha256 of the vocabulary {facts.get('tokenizer_sha256') or NOT_KNOWN}."
    if recipe is None:
        yield f"Data and settings: {NOT_KNOWN}; it was exported from a draft folder, not from its run."
        return
    marks = {Path(path).name: mark for path, mark in (manifest.get("files") or {}).items()}
    for split in ("train", "validation"):
        for entry in getattr(recipe.data, split):
            shown = entry.dataset or Path(entry.path).name
            mark = marks.get(shown)
            share = "" if entry.weight == 1 else f", weight {entry.weight:g}"
            yield f"Data ({split}): {shown}{share}, {f'sha256 {mark}' if mark else 'fingerprint ' + NOT_KNOWN}."
    for split, audit in (manifest.get("audit") or {}).items():
        yield (
            f"{split}: {audit['conversations']} conversations, {audit['tokens']} tokens, "
            f"{percent(audit['supervised_share'])} of them supervised."
        )
    answers = recipe.data.regenerate
    if answers is not None:
        temperatures = ", ".join(f"{value:g}" for value in answers.temperature)
        yield f"Answers were generated by the target itself ({', '.join(answers.splits)}), temperature {temperatures}."
    validation = facts.get("validation") or {}
    if "step" in validation:
        yield f"The draft of step {validation['step']}, the best on validation data."


def _settings(recipe: Recipe | None) -> str | None:
    if recipe is None:
        return None
    values = recipe.model_dump(mode="json", exclude_defaults=True, include=set(SHOWN))
    return yaml.safe_dump({name: values[name] for name in SHOWN if values.get(name)}, sort_keys=False)


def _limits(draft: Draft, folder: Path, source: Source, target: Target, report: dict | None) -> Iterator[str]:
    yield "Made for that one target: with any other model, also a fine-tune of it, nothing was measured."
    if source.recipe is not None:
        longest = source.recipe.data.max_length
        yield f"Trained on texts of at most {longest} tokens; what it drafts behind more was not trained."
        yield "Trained on the data above; on other domains and languages acceptance may be lower."
    if draft.method != "medusa":
        yield f"Positions: up to {draft.shape.max_position_embeddings}."
    if draft.draft_vocab_size < target.vocab_size and (draft.method != "kd"):
        covered = (source.manifest.get("coverage") or {}).get("validation")
        share = f", {percent(covered)} of what the target says in the validation data" if covered is not None else ""
        yield f"Drafts {draft.draft_vocab_size} of the target's {target.vocab_size} words{share}; others never."
    measured = f"; measured in {report['device']['dtype']}" if report else ""
    yield f"Weights stored in {', '.join(_dtypes(folder))}{measured}."


def _dtypes(folder: Path) -> list[str]:
    """The floating dtypes of an export's tensors."""
    headers = [json.loads(read_header(path)[0]) for path in folder.glob("*.safetensors")]
    kinds = {entry["dtype"] for header in headers for name, entry in header.items() if name != "__metadata__"}
    return sorted(str(STORED_DTYPES[kind]).removeprefix("torch.") for kind in kinds & STORED_DTYPES.keys())


def _licences(source: Source, target: Target) -> Iterator[str]:
    licence = target_licence(target)
    yield f"Target ({target.title}): {licence or NOT_KNOWN + ' here'}. What its licence says of derived models holds."
    if source.recipe is None:
        yield f"Data: {NOT_KNOWN}."
        return
    for entry in source.recipe.data.train:
        yield f"Data ({entry.dataset or Path(entry.path).name}): {NOT_KNOWN} here; as its owner says."


def _licence(source: Source, target: Target) -> str | None:
    """The draft's, for the card's front matter: the target's, of which it holds rows or layers; None where that is not
    known, or where the draft began as somebody else's.
    """
    begun_elsewhere = source.recipe is not None and source.recipe.draft.init_from is not None
    return None if begun_elsewhere else target_licence(target)


def target_licence(target: Target) -> str | None:
    """The licence that the target's own GGUF file or model card names."""
    path = Path(target.name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return gguf_text(path, "general.license")
    card = None if target.folder is None else target.folder / FILE
    if card is None or not card.is_file():
        return None
    found = (metadata_load(card) or {}).get("license")
    return found if isinstance(found, str) else None
