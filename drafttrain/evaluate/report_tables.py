"""The report's tables across groups: concurrency with break-even, categories, predictions, paired comparisons.

Pure functions over the completed dict of report.json (schema 1); None stands for what was not measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.evaluate.report_summary import (
    MISSING,
    Group,
    Run,
    interval_of,
    is_impossible,
    is_plain,
    mark_of,
    number,
    sampling_key,
    sampling_title,
    series_label,
)

NOT_TOLD_APART = "not told apart by this run"
CATEGORY_FIGURES = ("prompts", "speedup", "mean_acceptance_length", "intervals")


def concurrency_sections(report: Mapping[str, Any], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One for each sampling that was measured at several concurrencies: {"title", "slug", "groups", "columns": [1, 4],
    "rows": [{"run", "label", "cells": [a run or None], "break_even"}], "best": [ids, one a column]}.
    """
    settings: dict[tuple, list[Group]] = {}
    for group in groups:
        if group.runs and group.runs[0]["concurrency"] is not None:
            settings.setdefault(sampling_key(group.runs[0]), []).append(group)
    sections = []
    for number_, members in enumerate(settings.values()):
        columns = [group.runs[0]["concurrency"] for group in members]
        if len(columns) < 2:
            continue
        by_label: dict[tuple, dict[int, Run]] = {}
        for group in members:
            for run in group.runs:
                by_label.setdefault((series_label(run), run["k"], run["label"]), {})[run["concurrency"]] = run
        entries = [one for one in report["break_even"] or () if _fits(one, members[0].runs[0], first=not number_)]
        rows = [
            {
                "run": next(iter(runs.values())),
                "label": label,
                "cells": [runs.get(column) for column in columns],
                "break_even": _break_even_text(entries, label, k, runs, columns),
            }
            for (_, k, label), runs in by_label.items()
        ]
        title = sampling_title(members[0].runs[0])
        slug = f"concurrency-{len(sections) + 1}"
        best = [_best_id(group) for group in members]
        sections.append(
            {"title": title, "slug": slug, "groups": members, "columns": columns, "rows": rows, "best": best}
        )
    return sections


def _fits(entry: Mapping[str, Any], run: Run, first: bool) -> bool:
    """Whether a break-even entry is about the run's sampling; one that names none is about the report's first."""
    if entry.get("sampling") is None:
        return first
    return sampling_key(entry) == sampling_key(run)


def _best_id(group: Group) -> str | None:
    """The run to set in bold: the fastest that is lossless and possible, where it beats plain decoding."""
    fair = [run for run in group.runs if not mark_of(run) and not is_impossible(run) and (run["speedup"] or 0.0) > 1]
    return max(fair, key=lambda run: run["speedup"])["id"] if fair else None


def _break_even_text(
    entries: Sequence[Mapping[str, Any]], label: str, k: int, runs: Mapping[int, Run], columns: Sequence[int]
) -> str:
    """In words: where a draft at one K falls to plain decoding's speed."""
    bare = {label, series_label({"label": label, "draft": label})}
    found = next((one for one in entries if one.get("label") in bare and one.get("k") in (k, None)), None)
    if found is None:
        return MISSING
    if found.get("concurrency") is None:
        return f"beyond {columns[-1]}"
    first = runs.get(columns[0])
    if first is not None and first["speedup"] is not None and first["speedup"] <= 1:
        return "never pays"
    return f"{found['concurrency']:.3g}"


def categories(group: Group) -> dict[str, Any] | None:
    """The table by kind of prompt: {"names": [{"name", "prompts"}], "rows": [{"run", "cells": [figures or None]}]}.

    A category holds figures by name, or is a bare number, its speedup. None where no run has any.
    """
    runs = [run for run in group.runs if run["categories"]]
    names = list(dict.fromkeys(name for run in runs for name in run["categories"]))
    cells = [[_category(run["categories"].get(name)) for name in names] for run in runs]
    prompts = [next((cell["prompts"] for cell in column if cell), None) for column in zip(*cells, strict=True)]
    heads = [{"name": name, "prompts": count} for name, count in zip(names, prompts, strict=True)]
    rows = [{"run": run, "cells": row} for run, row in zip(runs, cells, strict=True)]
    return {"names": heads, "rows": rows} if names else None


def _category(value: Mapping[str, Any] | float | None) -> dict[str, Any] | None:
    if value is None:
        return None
    figures = value if isinstance(value, Mapping) else {"speedup": value}
    return {name: figures.get(name) for name in CATEGORY_FIGURES}


def predictions(groups: Sequence[Group]) -> dict[str, Any] | None:
    """{"rows": [{"run", "group", "predicted", "measured", "error", "tau_predicted", "tau"}], "median_error", "worst"}.

    None where no run carries a prediction. Errors are predicted / measured - 1; the median is of their sizes.
    """
    rows = []
    for group in groups:
        for run in group.runs:
            found = run["predicted"]
            if not found:
                continue
            error, predicted, measured = found.get("error"), found.get("speedup"), run["speedup"]
            if error is None and predicted is not None and measured:
                error = predicted / measured - 1
            rows.append(
                {
                    **{"run": run, "group": group.title, "predicted": predicted, "measured": measured, "error": error},
                    **{"tau_predicted": found.get("tau"), "tau": run["mean_acceptance_length"]},
                }
            )
    if not rows:
        return None
    sizes = [abs(row["error"]) for row in rows if row["error"] is not None]
    median = statistics.median(sizes) if sizes else None
    return {"rows": rows, "median_error": median, "worst": max(sizes, default=None), "count": len(sizes)}


def tuned(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The K that tuning chose: [{"concurrency", "label", "k", "predicted", "measured", "measured_k", "measured_best"}]
    with k 0 for plain decoding."""
    names = ("k", "predicted", "measured", "measured_k", "measured_best")
    return [
        {"concurrency": rows, "label": label, **{name: found.get(name) for name in names}}
        for rows, drafts in ((report["tune"] or {}).get("best") or {}).items()
        for label, found in drafts.items()
    ]


def rooflines(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What rooflines predict for devices that are not here, as evaluate/elsewhere.py leaves it."""
    return list((report["tune"] or {}).get("roofline") or ())


def comparisons(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Paired differences of two drafts: {"a", "b": labels, "marks", "setting", "tau", "tau_interval", "tau_verdict",
    "ratio", "ratio_interval", "ratio_verdict"}, a verdict being (words, status).

    An entry's "a" and "b" are labels or run ids; the setting is the entry's own, or that of run a.
    """
    by_id = {run["id"]: run for run in report["runs"]}
    rows = []
    for entry in report["comparisons"] or ():
        pair = [by_id.get(entry[side]) for side in ("a", "b")]
        labels = entry.get("labels") or [
            run["label"] if run else entry[side] for run, side in zip(pair, "ab", strict=True)
        ]
        a, b = (series_label({"label": label, "draft": label}) for label in labels)
        tau, ratio = (entry.get(name) or {} for name in ("tau_difference", "speedup_ratio"))
        rows.append(
            {
                **{"a": a, "b": b, "setting": _setting({**(pair[0] or {}), **entry})},
                "marks": [mark_of(run) if run else "" for run in pair],
                **{"tau": tau.get("value"), "tau_interval": _pair(tau)},
                **{"ratio": ratio.get("value"), "ratio_interval": _pair(ratio)},
                "tau_verdict": _verdict(_pair(tau), 0.0, f"{a} gains more tokens", f"{b} gains more tokens"),
                "ratio_verdict": _verdict(_pair(ratio), 1.0, f"{a} is faster", f"{b} is faster"),
            }
        )
    return rows


def _setting(entry: Mapping[str, Any]) -> str:
    sampling = entry.get("sampling")
    parts = [sampling_title({"mode": None, "draft": "none", **entry}) if isinstance(sampling, Mapping) else sampling]
    parts.append("" if entry.get("k") is None else f"K={entry['k']}")
    rows = entry.get("concurrency") or 1
    parts.append(f"{rows} requests at a time" if rows > 1 else "")
    return ", ".join(part for part in parts if part)


def _pair(figure: Mapping[str, Any]) -> tuple[float, float] | None:
    return interval_of({"intervals": {"value": figure.get("interval")}}, "value")


def _verdict(pair: tuple[float, float] | None, equal: float, above: str, below: str) -> tuple[str, str]:
    if pair is None:
        return "no interval", "open"
    if pair[0] <= equal <= pair[1]:
        return NOT_TOLD_APART, "open"
    return f"told apart: {above if pair[0] > equal else below}", "good" if pair[0] > equal else "bad"


def details(group: Group) -> dict[str, Any]:
    """What the detail tables of a group show: {"positions": most per-position rates, "total": whether the tokens/s of
    all requests are told, "prompts": whether the runs saw different numbers of prompts}."""
    return {
        "positions": max((len(run["per_position_acceptance"] or ()) for run in group.runs), default=0),
        "total": any((run["concurrency"] or 1) > 1 for run in group.rows),
        "prompts": any(run["prompts"] is not None for run in group.rows),
    }


def mean_drafted(run: Run) -> str:
    """Drafted tokens (a tree's nodes) of an iteration."""
    drafted, iterations = run["drafted_tokens"], run["iterations"] or run["draft_rounds"]
    return MISSING if is_plain(run) or drafted is None or not iterations else number(drafted / iterations)


def gibibytes(value: float | None) -> str:
    """Bytes in GiB, or MiB where that is less than a tenth of one."""
    if value is None:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.1f} MiB"


def milliseconds(value: float | None, digits: int = 1) -> str:
    """Seconds as milliseconds, or a dash."""
    return MISSING if value is None else f"{1000 * value:,.{digits}f} ms"
