"""What a report says, apart from how it looks: groups of runs, the headline, warnings, metric definitions.

Pure functions over the dict of report.json (schema 1); both the page and the terminal table are made from them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Run = Mapping[str, Any]

MISSING = "–"
REPETITION_NOTE_ABOVE = 0.2
OVERLAP_NOTE_ABOVE = 0.01
KIND_NAMES = {
    "ngram": "n-gram lookup",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "kd": "KD draft",
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
KIND_SLOTS = {"eagle3": 1, "ngram": 2, "medusa": 3, "kd": 4}

# One name for each figure, and the formula it is computed with.
GLOSSARY = (
    ("Iteration", "One forward pass of the target after the prefill, per request, also when nothing was drafted."),
    ("Draft round", "An iteration with at least one drafted token (what vLLM counts as num_drafts)."),
    ("Acceptance rate", "Accepted draft tokens / drafted tokens. Not defined for trees."),
    (
        "Mean acceptance length (tau)",
        "1 + accepted tokens / iterations: tokens per target pass, the bonus or replacement token included. Pooled "
        "over all iterations, never a mean of per-request means. A speedup cannot exceed it.",
    ),
    (
        "Per-position acceptance",
        "At position i: iterations in which the first i drafts were all accepted / iterations. Joint, so it never "
        "rises with i, and tau is 1 + its sum.",
    ),
    ("Conditional acceptance", "Per-position acceptance at i / that at i - 1: how good draft i is once it is reached."),
    (
        "step_acceptance/k",
        "Training curves only: how often step k of the training-time unroll hits the target's first choice, given the "
        "right tokens before it. Unconditional and teacher-forced, so not the per-position acceptance of the loop.",
    ),
    ("Tokens/s", "Decode only, after the token that the prefill yields; median, minimum and maximum over passes."),
    ("End-to-end tokens/s, TTFT", "The same with the prefill included; the time until the first token."),
    (
        "Speedup",
        "Pooled decode tokens/s over that of plain decoding in the same loop, same prompts, same sampling, "
        "configurations interleaved per prompt. Interval: 95%, bootstrap over prompts.",
    ),
    ("c", "Draft time of an iteration / (K x plain step): what one drafted position costs, in plain steps."),
    ("v", "Verification of an iteration / plain step, at the same batch size and context."),
    ("o", "Everything outside the target's forward and the draft, per iteration / plain step."),
    ("Cost model", "Speedup = tau / (v + K c + o)."),
    ("Ideal speedup", "tau / (1 + K c): if verifying cost no more than one plain step and nothing else took time."),
    (
        "Greedy, one-hot, probabilistic",
        "Greedy: temperature 0. One-hot: the target samples, the draft proposes its first choice. Probabilistic: the "
        "draft samples from its own distribution. All three keep the target's output distribution.",
    ),
)

RUN_KEYS = (
    *("id", "label", "draft", "checkpoint", "trained", "baseline", "mode", "sampling", "k", "tree", "concurrency"),
    *("iterations", "draft_rounds", "drafted_tokens", "accepted_tokens", "emitted_tokens", "acceptance_rate"),
    *("mean_acceptance_length", "per_position_acceptance", "conditional_acceptance", "intervals", "tokens_per_second"),
    *("end_to_end_tokens_per_second", "ttft", "speedup", "ideal_speedup", "c", "v", "o", "seconds", "categories"),
    *("identical_to_plain", "divergences"),
)
SECTION_KEYS = {
    "target": ("name", "fingerprint"),
    "device": ("name", "dtype", "threads"),
    "prompts": ("name", "count", "max_new_tokens", "train_overlap", "repeated_8gram_share"),
    "provenance": ("command", "versions", "recipe"),
}


@dataclass(frozen=True)
class Group:
    """Runs of equal sampling and concurrency, with the plain run that they are compared with."""

    title: str
    slug: str
    baseline: Run | None
    runs: tuple[Run, ...]

    @property
    def rows(self) -> tuple[Run, ...]:
        """The baseline first, then the drafted runs."""
        return self.runs if self.baseline is None else (self.baseline, *self.runs)


@dataclass(frozen=True)
class Series:
    """One draft across its runs: the same colour, marker and line in every plot and table."""

    label: str
    color: str
    marker: str
    dashed: bool


def complete(report: Mapping[str, Any]) -> dict[str, Any]:
    """The same report with every key of schema 1 that it lacks set to None."""
    full = {name: {**dict.fromkeys(keys), **(report.get(name) or {})} for name, keys in SECTION_KEYS.items()}
    full["certificate"] = report.get("certificate") or {}
    speeds = ("median", "min", "max")
    full["runs"] = [
        {
            **dict.fromkeys(RUN_KEYS),
            **run,
            "tokens_per_second": {**dict.fromkeys(speeds), **(run.get("tokens_per_second") or {})},
        }
        for run in report["runs"]
    ]
    return full


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A fixed-point figure, or a dash where it was not measured."""
    return MISSING if value is None else f"{value:,.{digits}f}{suffix}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent, or a dash."""
    return MISSING if value is None else f"{100 * value:.{digits}f}%"


def interval_of(run: Run, key: str) -> tuple[float, float] | None:
    """The 95% interval of a figure as (low, high); None where there is none."""
    pair = (run.get("intervals") or {}).get(key)
    return None if not pair or None in pair else (pair[0], pair[1])


def is_plain(run: Run) -> bool:
    return run["draft"] == "none"


def is_trained_draft(run: Run) -> bool:
    return run["draft"] not in ("none", "ngram") and run.get("trained") is not False


def is_impossible(run: Run) -> bool:
    """Whether the speedup exceeds tau: a target pass cannot be cheaper than free, so a clock or a baseline is wrong."""
    speedup, tau = run.get("speedup"), run.get("mean_acceptance_length")
    return not is_plain(run) and speedup is not None and tau is not None and speedup > tau


def output_text(run: Run) -> str:
    """Whether the text equals plain decoding's, in words."""
    identical = run.get("identical_to_plain")
    if is_plain(run) or identical is None:
        return MISSING
    count = len(run.get("divergences") or ())
    return "identical" if identical else f"{count} diverge" if count else "differs"


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Groups of equal temperature, top-p, top-k, draft mode and concurrency, in order of appearance.

    The baseline of a group is the run that its members name; plain runs that nothing names form groups of their own.
    """
    runs = list(runs)
    by_id = {run["id"]: run for run in runs}
    members: dict[tuple, list[Run]] = {}
    for run in runs:
        if not is_plain(run):
            members.setdefault(_group_key(run), []).append(run)
    named = {run.get("baseline") for group in members.values() for run in group}
    groups = []
    several = len({run.get("concurrency") for run in runs}) > 1
    for index, group in enumerate(members.values(), 1):
        ordered = tuple(sorted(group, key=_run_order))
        baseline = by_id.get(ordered[0].get("baseline"))
        groups.append(Group(_group_title(ordered[0], several), f"group-{index}", baseline, ordered))
    for run in runs:
        if is_plain(run) and run["id"] not in named:
            groups.append(Group(_group_title(run, several), f"group-{len(groups) + 1}", run, ()))
    return groups


def _group_key(run: Run) -> tuple:
    sampling = run.get("sampling") or {}
    mode = run.get("mode") if sampling.get("temperature") else "greedy"
    return mode, *(sampling.get(key) for key in ("temperature", "top_p", "top_k")), run.get("concurrency")


def _group_title(run: Run, name_concurrency: bool) -> str:
    sampling = run.get("sampling") or {}
    temperature = sampling.get("temperature") or 0.0
    title = "Greedy decoding"
    if temperature > 0:
        title = f"Sampled at temperature {temperature:g}"
        if (sampling.get("top_p") or 1.0) < 1.0:
            title += f", top-p {sampling['top_p']:g}"
        if sampling.get("top_k"):
            title += f", top-k {sampling['top_k']}"
        if not is_plain(run):
            title += f", {str(run.get('mode')).replace('_', '-')} drafts"
    return f"{title}, {run.get('concurrency')} at a time" if name_concurrency else title


def _run_order(run: Run) -> tuple:
    rank = 0 if is_trained_draft(run) else 1 if run["draft"] == "ngram" else 2
    return rank, KIND_SLOTS.get(run["draft"], 9), str(run.get("checkpoint")), bool(run.get("tree")), run.get("k") or 0


def series_of(runs: Iterable[Run]) -> dict[str, Series]:
    """Run id -> the series it belongs to. An untrained draft shares its trained sibling's colour, dashed."""
    found: dict[tuple, Series] = {}
    slots: dict[tuple, int] = {}
    result = {}
    for run in sorted(runs, key=_run_order):
        if is_plain(run):
            continue
        trained = run["draft"] == "ngram" or is_trained_draft(run)
        family = (run["draft"], run.get("checkpoint") if trained else None)
        if not trained:
            family = next((known for known in slots if known[0] == run["draft"]), family)
        if family not in slots:
            taken = set(slots.values())
            wished = KIND_SLOTS.get(run["draft"], 5)
            free = [slot for slot in (wished, 5, 6, 7, 8) if slot not in taken]
            slots[family] = free[0] if free else 8
        identity = (*family, trained, bool(run.get("tree")))
        if identity not in found:
            label = re.sub(r"[\s,]*\bk\s*=\s*\d+", "", run.get("label") or run["draft"]).strip() or run["draft"]
            slot = slots[family]
            found[identity] = Series(label, f"s{slot}", MARKERS[slot - 1], not trained or bool(run.get("tree")))
        result[run["id"]] = found[identity]
    return result


def headline(report: Mapping[str, Any], groups: list[Group]) -> dict[str, Any]:
    """The best trained draft, what it is compared with, and where its time goes. `run` is None without drafted runs.

    Best: the highest possible speedup among trained drafts (an impossible figure only where there is no other).
    """
    drafted = [(group, run) for group in groups for run in group.runs if run.get("speedup") is not None]
    trained = [(group, run) for group, run in drafted if is_trained_draft(run)]
    candidates = trained or drafted
    if not candidates:
        return {"run": None, "group": None, "trained": False, "comparisons": [], "candidates": 0}
    group, run = max(candidates, key=lambda pair: _credible_speedup(pair[1]))
    siblings = [other for _, other in drafted if other.get("baseline") == run.get("baseline") and other is not run]
    lookups = [other for other in siblings if other["draft"] == "ngram"]
    untrained = [other for other in siblings if other.get("trained") is False and other["draft"] == run["draft"]]
    comparisons = [
        {"name": name, "run": max(others, key=_credible_speedup)}
        for name, others in (
            ("n-gram lookup", lookups),
            (f"Untrained {KIND_NAMES.get(run['draft'], run['draft'])}", untrained),
        )
        if others
    ]
    for comparison in comparisons:
        comparison["verdict"], comparison["status"] = _verdict(run, comparison["run"])
    return {
        "run": run,
        "group": group,
        "trained": bool(trained),
        "candidates": len(candidates),
        "comparisons": comparisons,
        "cost": _cost(run),
        "sentence": _sentence(report, group, run),
    }


def _credible_speedup(run: Run) -> tuple[bool, float]:
    return not is_impossible(run), run["speedup"]


def _verdict(run: Run, other: Run) -> tuple[str, str]:
    if is_impossible(other):
        return "above tau, so not to be believed", "bad"
    ours, theirs = interval_of(run, "speedup"), interval_of(other, "speedup")
    ratio = run["speedup"] / other["speedup"] if other["speedup"] else None
    if ours and theirs and ours[0] <= theirs[1] and theirs[0] <= ours[1]:
        return "intervals overlap: not told apart by this run", "open"
    if ratio is None:
        return "no speed measured", "open"
    if ratio >= 1:
        return f"the trained draft is {ratio:.2f}× as fast", "good"
    return f"faster than the trained draft, {1 / ratio:.2f}×", "bad"


def _cost(run: Run) -> dict[str, float] | None:
    parts = [run.get(key) for key in ("k", "c", "v", "o", "mean_acceptance_length")]
    if any(part is None for part in parts):
        return None
    k, c, v, o, tau = parts
    total = v + k * c + o
    return {"draft": k * c, "verify": v, "rest": o, "total": total, "speedup": tau / total} if total > 0 else None


def _sentence(report: Mapping[str, Any], group: Group, run: Run) -> str:
    name = str((report.get("target") or {}).get("name") or "the target")
    speed = (run.get("tokens_per_second") or {}).get("median")
    plain = ((group.baseline or {}).get("tokens_per_second") or {}).get("median")
    rates = f": {number(speed, 1)} against {number(plain, 1)} tokens/s" if speed and plain else ""
    where = group.title[0].lower() + group.title[1:]
    return f"With {run['label']}, {name} decodes {run['speedup']:.2f}× as fast as without a draft{rates} ({where})."


def warnings(report: Mapping[str, Any], groups: list[Group]) -> list[dict[str, str]]:
    """What a reader must know before believing a figure: each {"level", "title", "text"}."""
    found = []
    impossible = sorted({run["label"] for group in groups for run in group.runs if is_impossible(run)})
    if impossible:
        text = (
            f"{', '.join(impossible)}: the speedup is above tau, the tokens gained per target pass. A draft cannot "
            "save more passes than that, so a clock, the baseline or the machine's drift is at fault. Measure again, "
            "interleaved."
        )
        found.append({"level": "bad", "title": "Impossible speedup", "text": text})
    prompts = report.get("prompts") or {}
    repeated = prompts.get("repeated_8gram_share")
    if repeated is not None and repeated > REPETITION_NOTE_ABOVE:
        text = (
            f"{percent(repeated)} of the generated positions repeat an 8-gram that the same text already holds. "
            "Looping text is easy to guess: it raises the acceptance of every draft, and most of all of n-gram lookup, "
            "whose only skill is to copy. Greedy figures flatter here; read the sampled ones, or use a target that "
            "does not loop."
        )
        found.append({"level": "warn", "title": "The text repeats itself", "text": text})
    overlap = prompts.get("train_overlap")
    if overlap is not None and overlap > OVERLAP_NOTE_ABOVE:
        text = (
            f"{percent(overlap)} of the prompts share a 13-gram, or the whole text, with the training data. Acceptance "
            "on them says less about new text; take prompts that were held out."
        )
        found.append({"level": "warn", "title": "Prompts overlap with the training data", "text": text})
    return found


def divergences(groups: list[Group]) -> list[dict[str, Any]]:
    """Every first divergence from plain greedy text, with the label of its run, in the order of the tables."""
    return [
        {"label": run["label"], **entry}
        for group in groups
        for run in group.runs
        for entry in run.get("divergences") or ()
    ]
