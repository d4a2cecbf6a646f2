"""The report's plots across groups and kinds of prompts: concurrency with break-even, categories, predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from drafttrain.evaluate.cost import break_even
from drafttrain.evaluate.report_figure import (
    SENTINELS,
    STYLE,
    Plot,
    add_legend,
    bar_figure,
    line_style,
    new_figure,
    to_svg,
)
from drafttrain.evaluate.report_summary import Group, Run, Series, fastest_by_series, interval_of, mark_of

BARS_IN_CATEGORY = 5


def concurrency_plots(title: str, groups: Sequence[Group], series: Mapping[str, Series]) -> list[Plot]:
    """Speedup, with break-even, and the tokens/s of all requests against concurrency; each draft at its best K.

    groups: of one sampling, in order of concurrency.
    """
    lines: dict[Series, dict[int, Run]] = {}
    for group in groups:
        for one, run in fastest_by_series(group.runs, series).items():
            if run.get("speedup") is not None:
                lines.setdefault(one, {})[run["concurrency"]] = run
    plots = [_speedups(title, lines), _throughput(title, lines, [group.baseline for group in groups if group.baseline])]
    return [plot for plot in plots if plot is not None]


def _speedups(title: str, lines: Mapping[Series, Mapping[int, Run]]) -> Plot | None:
    if not any(len(runs) > 1 for runs in lines.values()):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.0)
        axes.axhline(1.0, color=SENTINELS["plain"], linewidth=1.2, label="plain decoding")
        for index, (one, runs) in enumerate(lines.items()):
            shift = 1.025 ** (index - (len(lines) - 1) / 2)
            axes.plot([x * shift for x in runs], [run["speedup"] for run in runs.values()], **line_style(one))
            axes.lines[-1].set_label(one.label)
            bars = [(x * shift, *pair) for x, run in runs.items() if (pair := interval_of(run, "speedup"))]
            if bars:
                axes.vlines(*zip(*bars, strict=True), color=SENTINELS[one.color], linewidth=1.1, alpha=0.75)
            even = break_even({x: run["speedup"] for x, run in runs.items()})
            if even is not None and even > min(runs):
                axes.plot([even], [1.0], marker="|", markersize=13, color=SENTINELS[one.color], markeredgewidth=2)
                axes.annotate(f"{even:.3g}", (even, 1.0), (0, -15), textcoords="offset points", ha="center")
        _concurrency_axis(axes, sorted({x for runs in lines.values() for x in runs}))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.set_ylim(bottom=0)
        add_legend(figure, axes)
        svg = to_svg(figure, f"Speedup over plain decoding by concurrency, {title}.")
        caption = "Each draft at its best K there; 95% intervals. Upright mark: break-even with plain decoding."
        return Plot("Speedup by concurrency", caption, svg)


def _throughput(title: str, lines: Mapping[Series, Mapping[int, Run]], plain: Sequence[Run]) -> Plot | None:
    totals = {one: _totals(runs.values()) for one, runs in lines.items()}
    base = _totals(plain)
    if not any(len(points) > 1 for points in totals.values()):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.0)
        if base:
            axes.plot(list(base), list(base.values()), color=SENTINELS["plain"], marker=".", label="plain decoding")
        for one, points in totals.items():
            axes.plot(list(points), list(points.values()), **line_style(one), label=one.label)
        _concurrency_axis(axes, sorted({*base, *(x for points in totals.values() for x in points)}))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens/s of all requests")
        add_legend(figure, axes)
        svg = to_svg(figure, f"Tokens per second of all requests by concurrency, {title}.")
        return Plot("Throughput by concurrency", "Decoded tokens per second, summed over the requests at a time.", svg)


def _totals(runs) -> dict[int, float]:
    found = {run["concurrency"]: (run.get("tokens_per_second") or {}).get("total") for run in runs}
    return {rows: total for rows, total in found.items() if rows and total is not None}


def _concurrency_axis(axes: Axes, measured: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(measured, [str(rows) for rows in measured])
    axes.set_xticks([], minor=True)
    axes.set_xlim(measured[0] / 1.25, measured[-1] * 1.25)
    axes.set_xlabel("requests at a time (concurrency)")


def category_plot(group: Group, series: Mapping[str, Series]) -> Plot | None:
    """Speedup of a few drafts, each at its fastest K, by kind of prompt; tau where no speedup was measured."""
    runs = [run for run in group.runs if isinstance(next(iter((run["categories"] or {}).values()), None), Mapping)]
    fastest = fastest_by_series([run for run in runs if not mark_of(run)] or runs, series)
    chosen = sorted(fastest.items(), key=lambda item: (item[1].get("trained") is False, item[0].style))
    shown = chosen[:BARS_IN_CATEGORY]
    names = list(dict.fromkeys(name for _, run in shown for name in run["categories"]))
    measured = [key for key in ("speedup", "mean_acceptance_length") if _values(shown, names, key)]
    if not measured:
        return None
    key, pitch = measured[0], 0.13 * len(shown) + 0.1
    height = 0.8 / len(shown)
    with matplotlib.rc_context(STYLE):
        figure, axes = bar_figure(names, pitch)
        axes.axvline(1.0, color=SENTINELS["plain"], linewidth=1.2)
        for index, (one, run) in enumerate(shown):
            found = {row: run["categories"].get(name) or {} for row, name in enumerate(names)}
            found = {row: figures for row, figures in found.items() if figures.get(key) is not None}
            at = [row + (index - (len(shown) - 1) / 2) * height for row in found]
            widths = [figures[key] for figures in found.values()]
            faint = 0.45 if one.dashed else 0.9
            color = SENTINELS[one.color]
            axes.barh(at, widths, height=0.86 * height, color=color, alpha=faint, label=f"{one.label} (K={run['k']})")
            for y, figures in zip(at, found.values(), strict=True):
                if (pair := interval_of(figures, key)) is not None:
                    axes.hlines(y, *pair, color=SENTINELS["ink"], linewidth=1.1)
        title = "Speedup" if key == "speedup" else "Mean acceptance length"
        axes.set_xlabel("speedup over plain decoding" if key == "speedup" else "tau")
        axes.set_xlim(left=0)
        add_legend(figure, axes, length=1.2)
        svg = to_svg(figure, f"{title} by kind of prompt, {group.title}.")
        rest = " The others are in the table." if len(chosen) > len(shown) else ""
        return Plot(f"{title} by kind of prompt", f"Each draft at its fastest K; lines are 95% intervals.{rest}", svg)


def _values(shown: Sequence[tuple[Series, Run]], names: Sequence[str], key: str) -> list[float]:
    found = [(run["categories"].get(name) or {}).get(key) for _, run in shown for name in names]
    return [value for value in found if value is not None]


def prediction_plot(rows: Sequence[Mapping[str, Any]], series: Mapping[str, Series]) -> Plot | None:
    """Measured against predicted speedup, one point a run. rows: those of `report_tables.predictions`."""
    rows = [row for row in rows if row["predicted"] is not None and row["measured"] is not None]
    if not rows:
        return None
    ends = [value for row in rows for value in (row["predicted"], row["measured"])]
    low, high = 0.9 * min(ends), 1.08 * max(ends)
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.9)
        axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=SENTINELS["grid"])
        axes.plot([low, high], [low, high], color=SENTINELS["plain"], linewidth=1.2, label="predicted = measured")
        named = set()
        for row in rows:
            one = series[row["run"]["id"]]
            label = None if one in named else one.label
            named.add(one)
            pair = interval_of(row["run"], "speedup")
            if pair:
                axes.vlines(row["predicted"], *pair, color=SENTINELS[one.color], linewidth=1, alpha=0.6)
            look = line_style(one) | {"linestyle": "none", "label": label}
            axes.plot([row["predicted"]], [row["measured"]], **look)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("predicted speedup")
        axes.set_ylabel("measured speedup")
        add_legend(figure, axes)
        svg = to_svg(figure, "Measured against predicted speedup.")
        return Plot("Predicted against measured", "One point a run, with its 95% interval. Shaded: within 10%.", svg)
