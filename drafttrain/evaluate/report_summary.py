"""What a report says, apart from how it looks: groups of runs, the headline, warnings.

Pure functions over the dict of report.json (schema 1); both the page and the terminal table are made from them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Run = Mapping[str, Any]

MISSING = "–"
KIND_NAMES = {
    "ngram": "n-gram lookup",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "kd": "KD draft",
    "suffix": "suffix decoding",
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
KIND_SLOTS = {"eagle3": 1, "ngram": 2, "medusa": 3, "kd": 4}

RUN_KEYS = (
    *("id", "label", "draft", "checkpoint", "trained", "baseline", "mode", "sampling", "k", "tree", "concurrency"),
    *("iterations", "draft_rounds", "drafted_tokens", "accepted_tokens", "emitted_tokens", "acceptance_rate"),
    *("mean_acceptance_length", "per_position_acceptance", "conditional_acceptance", "intervals", "tokens_per_second"),
    *("end_to_end_tokens_per_second", "ttft", "speedup", "ideal_speedup", "c", "v", "o", "seconds", "categories"),
    *(
        "identical_to_plain",
        "divergences",
        "policy",
        "quantization",
        "lossy",
        "synthetic",
        "draft_lengths",
        "rounds",
        "itl",
    ),
    *("peak_memory_bytes", "predicted", "prompts", "notes", "denominator"),
)
SECTION_KEYS = {
    "target": ("name", "fingerprint", "tuned_from", "drift", "same_choice"),
    "device": ("name", "dtype", "threads", "capture", "peak_memory_bytes"),
    "prompts": ("name", "count", "requested", "max_new_tokens", "train_overlap", "repeated_8gram_share"),
    "engine": ("name", "version"),
    "provenance": ("command", "versions", "recipe", "chat"),
}
TOP_KEYS = ("interrupted", "interruption", "notes", "break_even", "comparisons", "tune")


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
    """One draft across its runs: the same colour, marker and line in every plot and table.

    style: 0 for a draft's own series; its trees, policies and lossy or untrained variants follow, in other dashes.
    mark: lossy, synthetic, or empty.
    """

    label: str
    color: str
    marker: str
    style: int
    mark: str = ""

    @property
    def dashed(self) -> bool:
        return self.style > 0


def complete(report: Mapping[str, Any]) -> dict[str, Any]:
    """The same report with every key of schema 1 that it lacks set to None."""
    full = {name: {**dict.fromkeys(keys), **(report.get(name) or {})} for name, keys in SECTION_KEYS.items()}
    full["certificate"] = report.get("certificate") or {}
    full |= {name: report.get(name) for name in TOP_KEYS}
    full["runs"] = [_complete_run(run) for run in report["runs"]]
    return full


def _complete_run(run: Run) -> dict[str, Any]:
    parts = {"tokens_per_second": ("median", "min", "max", "total"), "itl": ("p50", "p95")}
    nested = {name: {**dict.fromkeys(keys), **(run.get(name) or {})} for name, keys in parts.items()}
    return {**dict.fromkeys(RUN_KEYS), **run, **nested}


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


def mark_of(run: Run) -> str:
    """ "synthetic" or "lossy" for a run whose text is not the target's own, else empty: such a run is no headline."""
    return "synthetic" if run.get("synthetic") else "lossy" if run.get("lossy") else ""


def is_impossible(run: Run) -> bool:
    """Whether the speedup exceeds tau: a target pass cannot be cheaper than free, so a clock or a baseline is wrong."""
    speedup, tau = run.get("speedup"), run.get("mean_acceptance_length")
    return not is_plain(run) and speedup is not None and tau is not None and speedup > tau


def output_text(run: Run) -> str:
    """Whether the text equals plain decoding's, in words."""
    if mark_of(run):
        return mark_of(run)
    identical = run.get("identical_to_plain")
    if is_plain(run) or identical is None:
        return MISSING
    count = len(run.get("divergences") or ())
    return "identical" if identical else f"{count} diverge" if count else "differs"


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Groups of equal temperature, top-p, top-k, draft mode and concurrency: samplings in order of appearance, each
    from its smallest concurrency on.

    The baseline of a group is the run that its members name; plain runs that nothing names form groups of their own.
    """
    runs = list(runs)
    by_id = {run["id"]: run for run in runs}
    members: dict[tuple, list[Run]] = {}
    for run in runs:
        if not is_plain(run):
            members.setdefault((sampling_key(run), run.get("concurrency") or 0), []).append(run)
    order = list(dict.fromkeys(key for key, _ in members))
    named = {run.get("baseline") for group in members.values() for run in group}
    groups = []
    several = bool({run.get("concurrency") for run in runs} - {None, 1})
    for _, group in sorted(members.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        ordered = tuple(sorted(group, key=_run_order))
        baseline = by_id.get(ordered[0].get("baseline"))
        groups.append(Group(_group_title(ordered[0], several), f"group-{len(groups) + 1}", baseline, ordered))
    for run in runs:
        if is_plain(run) and run["id"] not in named:
            groups.append(Group(_group_title(run, several), f"group-{len(groups) + 1}", run, ()))
    return groups


def sampling_key(run: Run) -> tuple:
    """What runs must share to be compared at different concurrency."""
    sampling = run.get("sampling") or {}
    mode = run.get("mode") if sampling.get("temperature") else "greedy"
    return mode, *(sampling.get(key) for key in ("temperature", "top_p", "top_k"))


def sampling_title(run: Run) -> str:
    """How the tokens were chosen, in words."""
    sampling = run.get("sampling") or {}
    temperature = sampling.get("temperature") or 0.0
    if temperature <= 0:
        return "Greedy decoding"
    title = f"Sampled at temperature {temperature:g}"
    if (sampling.get("top_p") or 1.0) < 1.0:
        title += f", top-p {sampling['top_p']:g}"
    if sampling.get("top_k"):
        title += f", top-k {sampling['top_k']}"
    return title if is_plain(run) else f"{title}, {str(run.get('mode')).replace('_', '-')} drafts"


def _group_title(run: Run, name_concurrency: bool) -> str:
    rows = run.get("concurrency")
    if not name_concurrency or rows is None:
        return sampling_title(run)
    return f"{sampling_title(run)}, {rows} request{'s' if rows > 1 else ''} at a time"


def series_label(run: Run) -> str:
    """The label without its K."""
    label = run.get("label") or run["draft"]
    return re.sub(r"[\s,]*\bk\s*=\s*\d+", "", label).strip() or run["draft"]


def _is_variant(run: Run) -> bool:
    return bool(run.get("tree") or run.get("policy") or mark_of(run))


def _run_order(run: Run) -> tuple:
    rank = 3 if mark_of(run) else 0 if is_trained_draft(run) else 1 if run["draft"] == "ngram" else 2
    kind = (KIND_SLOTS.get(run["draft"], 9), str(run.get("checkpoint")))
    return rank, *kind, _is_variant(run), series_label(run), run.get("k") or 0


def series_of(runs: Iterable[Run]) -> dict[str, Series]:
    """Run id -> the series it belongs to: one for each label without its K.

    A draft's variants share its colour in other dashes, and so does its untrained sibling.
    """
    found: dict[tuple, Series] = {}
    slots: dict[tuple, int] = {}
    result = {}
    for run in sorted(runs, key=_run_order):
        if is_plain(run):
            continue
        label = series_label(run)
        family = _family(run, label, list(slots))
        if family not in slots:
            wished = KIND_SLOTS.get(run["draft"], 5)
            slots[family] = next((slot for slot in (wished, 5, 6, 7, 8) if slot not in slots.values()), 8)
        slot, identity = slots[family], (*family, label)
        if identity not in found:
            plainest = is_trained_draft(run) or run["draft"] == "ngram"
            style = sum(one.color == f"s{slot}" for one in found.values()) or (0 if plainest else 1)
            marker, mark = MARKERS[(slot - 1 + 3 * style) % len(MARKERS)], mark_of(run)
            shown = label if not mark or mark in label else f"{label} ({mark})"
            found[identity] = Series(shown, f"s{slot}", marker, style, mark)
        result[run["id"]] = found[identity]
    return result


def _family(run: Run, label: str, known: list[tuple]) -> tuple:
    """(kind, checkpoint, label where there is no checkpoint) of the draft that a run belongs to."""
    kind, checkpoint = run["draft"], run.get("checkpoint")
    if kind != "ngram" and not is_trained_draft(run):
        return next((one for one in known if one[0] == kind), (kind, None, label))
    if checkpoint is not None:
        return kind, checkpoint, ""
    if _is_variant(run):
        siblings = [one for one in known if one[:2] == (kind, None) and f"{label} ".startswith(f"{one[2]} ")]
        return max(siblings, key=lambda one: len(one[2]), default=(kind, None, label))
    return kind, None, label


def fastest_by_series(runs: Iterable[Run], series: Mapping[str, Series]) -> dict[Series, Run]:
    """Each draft's run with the highest speedup, its first one where none was measured."""
    fastest: dict[Series, Run] = {}
    for run in runs:
        one = series[run["id"]]
        if one not in fastest or (run.get("speedup") or 0.0) > (fastest[one].get("speedup") or 0.0):
            fastest[one] = run
    return fastest


def headline(report: Mapping[str, Any], groups: list[Group]) -> dict[str, Any]:
    """The best trained draft, what it is compared with, and where its time goes. `run` is None without drafted runs.

    Best: the highest possible speedup among trained drafts (an impossible figure only where there is no other). Lossy
    and synthetic runs never count.
    """
    timed = [(group, run) for group in groups for run in group.runs if run.get("speedup") is not None]
    drafted = [(group, run) for group, run in timed if not mark_of(run)]
    trained = [(group, run) for group, run in drafted if is_trained_draft(run)]
    candidates = trained or drafted
    if not candidates:
        return {"run": None, "group": None, "trained": False, "comparisons": [], "candidates": 0, "marked": len(timed)}
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


def divergences(groups: list[Group]) -> list[dict[str, Any]]:
    """Every first divergence from plain greedy text, with the label of its run, in the order of the tables."""
    names = ("prompt", "position", "token", "plain_token", "margin", "ulps", "unit")
    return [
        {"label": run["label"], **dict.fromkeys(names), **entry}
        for group in groups
        for run in group.runs
        for entry in run.get("divergences") or ()
    ]
