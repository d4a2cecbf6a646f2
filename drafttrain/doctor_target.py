"""Checks of the target that is loaded against the one that the draft was trained for."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.data.features import teacher_statistics
from drafttrain.doctor_case import Case, Problem, Result, Unmeasured, verdict
from drafttrain.doctor_words import percent
from drafttrain.drafts.base import quantization_of, template_hash, tokenizer_hash, tuned_facts

SAME_CHOICE = 0.95
"""The same target in the same dtype chooses otherwise at about one token in a hundred, where bfloat16 rounds by the
shape of a batch; 4-bit weights do at one in ten.
"""
RETRAIN = "answers and features of this very target: prepare again with --fresh, then train"


def fingerprint(case: Case) -> Result:
    """Target, tokenizer and template as the run's files name them against those loaded now, and whether the draft loads
    at all. Of a target tuned with its heads (Medusa-2) the tuned one counts.
    """
    facts, target = case.facts, case.target
    tuned = bool(tuned_facts(case.folder))
    expected = facts.get("target_fingerprint") or (None if tuned else case.manifest.get("fingerprint"))
    if expected is None and not case.refusal:
        raise Unmeasured("the draft's folder has no drafttrain.json: nothing says which target it was trained for")
    problems: list[Problem] = [(f"the draft does not load: {case.refusal}", "see there")] if case.refusal else []
    name = facts.get("target") or case.manifest.get("target", "another target")
    given = f"--target {name}"
    if expected not in (None, target.fingerprint):
        found = f"trained for {name} ({expected[:8]}), loaded is {target.name} ({target.fingerprint[:8]})"
        problems.append((f"another target: {found}", f"{given}, or {RETRAIN}"))
    pairs = [
        ("tokenizer", facts.get("tokenizer_sha256"), tokenizer_hash),
        ("chat template", facts.get("target_template_sha256"), template_hash),
    ]
    for what, before, hashed in pairs:
        if before and target.tokenizer is not None and hashed(target.tokenizer) != before:
            now = hashed(target.tokenizer)
            problems.append((f"another {what} ({before[:8]}, now {now[:8]})", f"{given}, or {RETRAIN}"))
    manifest = case.manifest.get("fingerprint")
    if not tuned and manifest and facts.get("target_fingerprint") not in (None, manifest):
        problems.append(("the draft and the prepared data belong to two targets", "train again from this run's recipe"))
    return verdict(
        problems,
        [f"target {target.title} {target.fingerprint[:8]}, tokenizer and template as at training"]
        if not problems
        else [],
    )


def dtype(case: Case) -> Result:
    """Dtype and quantisation of the target against those trained for, and how often it still chooses as it did then.

    The record is drafttrain.json, else the recipe. The measure, where the run keeps one: stored first choices, or the
    target's own greedy answers, against its choice on the same tokens now, at least SAME_CHOICE.
    """
    target, facts, recipe = case.target, case.facts, case.recipe
    now = str(target.dtype).removeprefix("torch.")
    before = facts.get("target_dtype") or (
        None if recipe is None or recipe.target.dtype == "auto" else recipe.target.dtype
    )
    quantized, was = quantization_of(target), facts.get("target_quantization")
    if was is None and recipe is not None:
        was = "GGUF" if recipe.target.gguf_file or recipe.target.name_or_path.endswith(".gguf") else None
    problems: list[Problem] = []
    if before is not None and before != now:
        problems.append(
            (f"trained for the target in {before}, loaded in {now}", f"target.dtype: {before}, or {RETRAIN}")
        )
    if was is not None and was != quantized:
        found = f"trained for weights of quantisation {was}, loaded {quantized}"
        problems.append((found, f"serve the target that it was trained for, or {RETRAIN}"))
    record = None if tuned_facts(case.folder) else _record(case)
    evidence = [
        f"{now}, quantisation: {quantized}" + ("" if before or was else " (the record does not say what it was)")
    ]
    if record is None and before is None and was is None:
        raise Unmeasured(f"loaded in {now}, quantisation {quantized}; nothing says what the draft was trained for")
    if record is not None:
        agreed, count, what = record
        evidence.append(f"the same choice as {what} at {percent(agreed)} of {count} tokens")
        if agreed < SAME_CHOICE:
            found = f"the target chooses otherwise at {percent(1 - agreed)} of {count} tokens than {what}"
            problems.append((found, f"load it as at training (dtype, quantisation, files), or {RETRAIN}"))
    return verdict(problems, evidence, dtype=now, trained_dtype=before, same_choice=record and record[0])


def _record(case: Case) -> tuple[float, int, str] | None:
    """(share of the same choices, tokens, what of) between the target when the data was prepared and now."""
    rows = case.rows.get("train", [])[: case.samples]
    same = count = 0
    for row, stored in stored_rows(case, len(rows)):
        if (before := _stored_choice(case, stored)) is not None:
            now, needed = choices(case, row)
            same += int((now == before[: len(now)])[needed].sum())
            count += int(needed.sum())
    if count:
        return same / count, count, "stored with the features"
    for row in _greedy_rows(case):
        now, needed = choices(case, row)
        following = torch.tensor([*row["input_ids"][1:], -1])
        same += int((now == following)[needed].sum())
        count += int(needed.sum())
    return (same / count, count, "its greedy training answers") if count else None


def _greedy_rows(case: Case) -> list[dict]:
    """Some training rows that the target answered at temperature 0 itself; none where that is not known."""
    settings = case.recipe.data.regenerate if case.recipe else None
    if settings is None or "train" not in settings.splits or case.manifest["audit"]["train"]["dropped"]:
        return []
    temperatures = settings.temperature
    greedy = [row for row in case.rows["train"] if temperatures[row["index"] % len(temperatures)] == 0]
    return greedy[: case.samples]


@torch.no_grad()
def choices(case: Case, row: dict) -> tuple[Tensor, Tensor]:
    """The target's first choice behind each token of a row, int64 [T], and where it is asked for, bool [T]: in front of
    supervised tokens.
    """
    target, n = case.target, case.target.num_layers
    ids = torch.tensor([row["input_ids"]])
    last = target.hidden_states(ids, None, [n])[n][0]
    _, chosen = teacher_statistics(target.head(), last)
    return chosen.cpu(), torch.tensor([*row["loss_mask"][1:], 0]).bool()


def _stored_choice(case: Case, stored: dict[str, Tensor]) -> Tensor | None:
    if "target_argmax" in stored:
        return stored["target_argmax"].long()
    if "last_hidden" in stored:
        last = stored["last_hidden"].to(case.target.device)
        return teacher_statistics(case.target.head(), last)[1].cpu()
    return None


def stored_rows(case: Case, count: int) -> Iterator[tuple[dict, dict[str, Tensor]]]:
    """The first training rows with what is stored of them, whatever target it was stored for; none without a store."""
    folder: Path = case.run.prepared / "features" / "train"
    if not (folder / "manifest.json").exists():
        return
    place = 0
    rows = case.rows.get("train", [])
    for shard in json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["shards"]:
        with safe_open(folder / shard["file"], "pt") as file:
            start = 0
            for length in shard["lengths"]:
                if place >= min(count, len(rows)):
                    return
                yield rows[place], {name: file.get_slice(name)[start : start + length] for name in file.keys()}  # noqa: SIM118
                start += length
                place += 1
