"""Checks of where a draft is used against where it learned: words, kinds of text, lengths."""

import math
import random
from collections import Counter
from collections.abc import Iterable

import torch

from drafttrain.data.coverage import ALL, DEPTH, coverage_table
from drafttrain.data.vocab import DraftVocab, special_ids
from drafttrain.doctor_case import Case, Problem, Result, verdict
from drafttrain.doctor_words import Z, differ, hits_of, percent, said, share
from drafttrain.specdec.metrics import Counts

LENGTH_SHARE, MOST_MISSING = 0.9, 0.05
"""Of the acceptance length that drafting every word could reach: a coverage of 95% leaves this much at K = 4."""
MISSING_SHOWN = 8
DRAWS, EXCESS, DROP = 40, 0.05, 0.8
"""Random training samples of the same size; bits by which a divergence must exceed the largest of theirs; acceptance on
the evaluation texts as a share of that on held-out training data.
"""
FALL = 0.8
"""Acceptance behind the trained length as a share of that within it."""


# vocabulary


def vocabulary(case: Case) -> Result:
    """How much of what the target really writes the draft vocabulary holds, over its own answers here.

    Fails where the ceiling that it sets on the acceptance length at K = DEPTH is below LENGTH_SHARE of what all words
    would allow, and the words that are missing are more than MOST_MISSING by more than chance (Z standard errors).
    """
    draft, target = case.draft, case.target
    rows = case.answer_rows()
    ids = draft.draft_ids.cpu()
    vocab = DraftVocab(ids, 0.0, 0)
    table = coverage_table(vocab, {"train": rows}, target.vocab_size, special_ids(target))["splits"]["train"]
    figures = table[ALL]
    coverage, length, whole = figures["chosen_coverage"], figures["chosen_length"], figures["length"][-1]
    known = set(ids.tolist())
    missing = Counter(token for row in rows for token in said(row) if token not in known)
    told = (
        f"{len(ids)} of {target.vocab_size} words hold {percent(coverage)} of {figures['tokens']} tokens of its answers"
    )
    evidence = [f"{told}; ceiling on the acceptance length at K = {DEPTH}: {length:.2f} of {whole:.2f}"]
    if missing and target.tokenizer is not None:
        shown = ", ".join(
            f"{target.tokenizer.decode([token])!r} x{count}" for token, count in missing.most_common(MISSING_SHOWN)
        )
        evidence.append(f"missing: {shown}")
    trained = case.manifest.get("coverage", {})
    if trained:
        evidence.append(
            "of the prepared data: " + ", ".join(f"{split} {percent(value)}" for split, value in trained.items())
        )
    low = {name: one["chosen_coverage"] for name, one in table.items() if name != ALL}
    if low:
        evidence.append("by category: " + ", ".join(f"{name} {percent(value)}" for name, value in low.items()))
    problems: list[Problem] = []
    lacking, tokens = sum(missing.values()), figures["tokens"]
    chance = Z * math.sqrt(tokens * MOST_MISSING * (1 - MOST_MISSING))
    if length < LENGTH_SHARE * whole and lacking > MOST_MISSING * tokens + chance:
        mend = "a larger data.draft_vocab, or training answers that the target gives to such prompts (data.regenerate)"
        problems.append((f"the draft vocabulary lacks {percent(1 - coverage)} of what the target writes", mend))
    return verdict(problems, evidence, coverage=coverage, length=length, whole=whole)


# drift


def divergence(first: Counter, second: Counter) -> float:
    """Jensen-Shannon divergence of two distributions of counts, in bits, 0 to 1 (Lin 1991)."""
    totals = (sum(first.values()), sum(second.values()))
    if not all(totals):
        return 0.0
    total = 0.0
    for token in first.keys() | second.keys():
        p, q = first[token] / totals[0], second[token] / totals[1]
        mean = (p + q) / 2
        for value in (p, q):
            total += value / 2 * torch.tensor(value / mean).log2().item() if value else 0.0
    return total


def drift(case: Case) -> Result:
    """Evaluation texts against training texts: token distributions, words never seen, and acceptance on both.

    The divergence (Jensen-Shannon, over all tokens but special ones) is held against DRAWS random training samples of
    as many texts, since few texts diverge from many by chance. Fails where it exceeds the largest of theirs by EXCESS
    bits and acceptance at step 1 is below DROP of that on held-out data (validation, else training rows).
    """
    draft = case.draft
    case.known_rows()
    texts = case.answer_rows()
    specials = set(special_ids(case.target))
    trained = [Counter(t for t in row["input_ids"] if t not in specials) for row in case.some("train")]
    whole = _sum(trained)
    asked = _sum(Counter(t for t in row["input_ids"] if t not in specials) for row in texts)
    rng = random.Random(0)
    size = min(len(texts), max(1, len(trained) // 2))
    draws = [divergence(_sum(rng.sample(trained, size)), whole) for _ in range(DRAWS)]
    apart = divergence(asked, whole)
    unseen = sum(count for token, count in asked.items() if token not in whole) / max(1, sum(asked.values()))
    evidence = [
        f"divergence from the training texts {apart:.3f} bits, of random training samples {min(draws):.3f} to "
        f"{max(draws):.3f}; {percent(unseen)} of the tokens never occur in training"
    ]
    found = {"evaluation": (hits_of(draft, case.texts, 1), case.texts.valid(1))}
    for split in ("train", "validation"):
        measured = case.row_texts(split)
        if measured is not None:
            found[split] = hits_of(draft, measured, 1), measured.valid(1)
    shares = {name: share(*pair) for name, pair in found.items()}
    evidence.append(
        "acceptance at step 1, teacher-forced: "
        + ", ".join(f"{name} {percent(value)}" for name, value in shares.items())
    )
    evidence += _by_category(case)
    held = "validation" if "validation" in found else "train"
    counts = [(int((hits & valid).sum()), int(valid.sum())) for hits, valid in (found["evaluation"], found[held])]
    problems: list[Problem] = []
    if apart > max(draws) + EXCESS and shares["evaluation"] < DROP * shares[held] and differ(*counts[0], *counts[1]):
        mend = "add such prompts to data.train (with data.regenerate, so that the target answers them) and train again"
        what = f"acceptance {percent(shares['evaluation'])} on them, {percent(shares[held])} on {held} rows"
        problems.append((f"the evaluation texts are of another kind than the training texts: {what}", mend))
    return verdict(problems, evidence, divergence=apart, chance=max(draws), unseen=unseen, acceptance=shares)


def _sum(counters: Iterable[Counter]) -> Counter:
    total: Counter = Counter()
    for one in counters:
        total.update(one)
    return total


def _by_category(case: Case) -> list[str]:
    counts: dict[str, Counts] = {}
    for prompt, _, drafted in case.answers.pairs():
        if prompt.category:
            counts.setdefault(prompt.category, Counts()).add(drafted.counts)
    if len(counts) < 2:
        return []
    ordered = sorted(counts.items(), key=lambda item: item[1].mean_acceptance_length)
    told = ", ".join(f"{name} {one.mean_acceptance_length:.2f}" for name, one in ordered)
    return [f"acceptance length in the loop by category: {told}"]


# context


def context(case: Case) -> Result:
    """Acceptance at step 1 by position, within and behind the longest training row.

    The same answers stand at early and late positions (`Case.documents`). Fails where evaluation reaches behind the
    trained length and acceptance there is below FALL of that within, by more than chance, or where a small model has
    fewer positions than are served. Positions that are not reached do not count.
    """
    draft, texts = case.draft, case.documents
    longest = max((len(row["input_ids"]) for row in case.rows.get("train", [])), default=None)
    served = max(len(prompt.ids) for prompt in case.prompts) + case.settings.max_new_tokens
    hits, valid = hits_of(draft, texts, 1)[0], texts.valid(1)[0]
    T = valid.shape[1]
    places = torch.arange(T, device=valid.device)
    trained = longest if longest is not None else max(T // 2, 1)
    edges = sorted({0, trained // 2, trained, 2 * trained, T})
    told = {}
    for start, end in zip(edges[:-1], [edge for edge in edges[1:] if edge <= T], strict=False):
        inside = valid & (places >= start) & (places < end)
        if inside.any():
            told[f"{start}-{end}"] = share(hits, inside)
    within = valid & (places < trained)
    behind = valid & (places >= trained) & (places < (served if longest is not None else T))
    counts = [(int((hits & part).sum()), int(part.sum())) for part in (behind, within)]
    evidence = [
        "acceptance at step 1 by position: " + ", ".join(f"{name} {percent(value)}" for name, value in told.items())
    ]
    length = "the trained length is not known" if longest is None else f"the longest training row has {longest} tokens"
    evidence.append(f"{length}; evaluation reaches {served}")
    problems: list[Problem] = []
    low = share(hits, behind) < FALL * share(hits, within)
    if counts[0][1] and low and differ(*counts[0], *counts[1]):
        far, near = percent(share(hits, behind)), percent(share(hits, within))
        found = f"behind position {trained} acceptance is {far}, before it {near}"
        problems.append((found, f"train on longer rows (data.max_length at least {served}), or draft.sliding_window"))
    positions = case.small_positions
    if positions is not None and positions < served:
        found = (
            f"the small model has {positions} positions, evaluation reaches {served}: what outgrows it is not drafted"
        )
        problems.append((found, "a small model with the target's positions"))
    return verdict(problems, evidence, by_position=told, trained=longest, served=served)
