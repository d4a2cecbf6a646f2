"""The report's plots of training and of one group of runs: speedup by K, acceptance by position, speeds, time split."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from drafttrain.evaluate.report_figure import (
    SENTINELS,
    STYLE,
    Plot,
    add_legend,
    bar_figure,
    bar_values,
    line_style,
    new_figure,
    to_svg,
)
from drafttrain.evaluate.report_summary import Group, Run, Series, fastest_by_series, interval_of, is_plain

BARS_AT_MOST = 12
PARTS = {"verify": "verify", "draft": "draft", "begin": "draft reads prompt", "rest": "rest"}


def training_plots(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Loss, acceptance by unroll step, validation acceptance length and learning rate against the step.

    rows: the training log, each with "step", perhaps "minutes", and any of "loss", "eval_loss", "step_acceptance/k",
    "eval_acceptance_length", "learning_rate". A plot whose figures are missing is left out.
    """
    rows = [row for row in rows if row.get("step") is not None]
    names = sorted({key for row in rows for key in row if re.fullmatch(r"step_acceptance/\d+", key)}, key=_step_number)
    losses = [("loss", "training", SENTINELS["s1"]), ("eval_loss", "validation", SENTINELS["s2"])]
    ramp = [SENTINELS[f"q{7 - round(5 * index / max(len(names) - 1, 1))}"] for index in range(len(names))]
    steps = [(name, f"k={_step_number(name)}", color) for name, color in zip(names, ramp, strict=True)]
    plots = [
        _curves(rows, losses, "Loss", "Nats per row of the first unroll step, all steps weighted."),
        _curves(
            rows, steps, "Acceptance in training", "step_acceptance/k: teacher-forced and unconditional.", percent=True
        ),
        _curves(
            rows,
            [("eval_acceptance_length", "tau", SENTINELS["s1"])],
            "Acceptance length on validation",
            "Checkpoints are chosen by this curve; the tables are on test prompts.",
        ),
        _curves(rows, [("learning_rate", "learning rate", SENTINELS["plain"])], "Learning rate", "As scheduled."),
    ]
    return [plot for plot in plots if plot is not None]


def _step_number(name: str) -> int:
    return int(name.rsplit("/", 1)[1])


def _curves(rows, lines, title: str, caption: str, percent: bool = False) -> Plot | None:
    drawn = []
    for key, label, color in lines:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            drawn.append((label, color, points))
    if not drawn:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(2.7)
        for label, color, points in drawn:
            marker = "o" if len(points) <= 20 else None
            axes.plot(*zip(*points, strict=True), color=color, label=label, marker=marker, markersize=3.5)
        axes.set_xlabel("step")
        _minutes_axis(axes, rows)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.set_ylim(bottom=0)
        if len(drawn) > 1:
            add_legend(figure, axes, columns=7, length=1.0)
        return Plot(title, caption, to_svg(figure, f"{title} against the training step."))


def _minutes_axis(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A second scale on top: the minutes of training at which a step was reached."""
    timed = sorted((row["minutes"], row["step"]) for row in rows if row.get("minutes") is not None)
    if len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return
    minutes, steps = zip(*timed, strict=True)
    low, high = axes.get_xlim()
    ticks = [tick for tick in MaxNLocator(5).tick_values(minutes[0], minutes[-1]) if minutes[0] <= tick <= minutes[-1]]
    top = axes.secondary_xaxis("top")
    top.set_xticks([_interpolate(tick, minutes, steps) for tick in ticks], [f"{tick:g} min" for tick in ticks])
    top.spines["top"].set_visible(False)
    axes.set_xlim(low, high)


def _interpolate(value: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    index = next((i for i in range(1, len(xs)) if xs[i] >= value), len(xs) - 1)
    span = xs[index] - xs[index - 1]
    share = (value - xs[index - 1]) / span if span else 1.0
    return ys[index - 1] + share * (ys[index] - ys[index - 1])


def group_plots(group: Group, series: Mapping[str, Series]) -> list[Plot]:
    """Speedup by K, per-position acceptance, tokens/s and the time of an iteration, for one group of runs."""
    shown, note = _shown(group, series)
    plots = (_by_k(group, series), _positions(group, series), _speeds(shown, series, note), _iterations(shown, note))
    return [plot for plot in plots if plot is not None]


def _shown(group: Group, series: Mapping[str, Series]) -> tuple[Group, str]:
    """The runs that get a bar: all, or each draft at its fastest K where those are too many; and a note saying so."""
    if len(group.rows) <= BARS_AT_MOST:
        return group, ""
    return replace(group, runs=tuple(fastest_by_series(group.runs, series).values())), " Each draft at its fastest K."


def _by_k(group: Group, series: Mapping[str, Series]) -> Plot | None:
    lines: dict[Series, list[Run]] = {}
    for run in group.runs:
        if run.get("speedup") is not None and run.get("k"):
            lines.setdefault(series[run["id"]], []).append(run)
    if not any(len(runs) > 1 for runs in lines.values()):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(2.9)
        axes.axhline(1.0, color=SENTINELS["plain"], linewidth=1.2, label="plain decoding")
        shift = 0.07
        for index, (one, runs) in enumerate(lines.items()):
            offset = shift * (index - (len(lines) - 1) / 2)
            xs, ys = [run["k"] + offset for run in runs], [run["speedup"] for run in runs]
            axes.plot(xs, ys, **line_style(one), label=one.label)
            bars = [(x, *pair) for x, run in zip(xs, runs, strict=True) if (pair := interval_of(run, "speedup"))]
            if bars:
                axes.vlines(*zip(*bars, strict=True), color=SENTINELS[one.color], linewidth=1.1, alpha=0.75)
        axes.set_xlabel("K, drafted tokens per iteration (a tree's depth)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.set_ylim(bottom=0)
        add_legend(figure, axes)
        svg = to_svg(figure, f"Speedup over plain decoding by K, {group.title}.")
        return Plot("Speedup by K", "Over plain decoding; bars are 95% intervals over prompts.", svg)


def _positions(group: Group, series: Mapping[str, Series]) -> Plot | None:
    deepest: dict[Series, Run] = {}
    for run in group.runs:
        rates, one = run.get("per_position_acceptance") or (), series[run["id"]]
        if rates and (one not in deepest or len(rates) > len(deepest[one]["per_position_acceptance"])):
            deepest[one] = run
    if not deepest:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(2.9)
        for one, run in deepest.items():
            rates = run["per_position_acceptance"]
            axes.plot(range(1, len(rates) + 1), rates, **line_style(one), label=f"{one.label} (K={run.get('k')})")
        axes.set_xlabel("draft position")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(0, 1)
        add_legend(figure, axes)
        svg = to_svg(figure, f"Per-position acceptance by draft, {group.title}.")
        caption = "Iterations in which all drafts up to a position were accepted; largest K of each. Trees: by depth."
        return Plot("Per-position acceptance", caption, svg)


def _speeds(group: Group, series: Mapping[str, Series], note: str) -> Plot | None:
    runs = [run for run in group.rows if (run.get("tokens_per_second") or {}).get("median") is not None]
    if not runs:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = bar_figure([run["label"] for run in runs])
        tops = []
        for row, run in enumerate(runs):
            speed = run["tokens_per_second"]
            one = series.get(run["id"])
            color = SENTINELS[one.color if one else "plain"]
            axes.barh(row, speed["median"], color=color, height=0.62, alpha=0.45 if one and one.dashed else 1.0)
            low, high = speed.get("min"), speed.get("max")
            if low is not None and high is not None:
                axes.hlines(row, low, high, color=SENTINELS["ink"], linewidth=1.2)
                axes.vlines([low, high], row - 0.16, row + 0.16, color=SENTINELS["ink"], linewidth=1.2)
            tops.append(max(speed["median"], high or 0.0))
        bar_values(axes, tops, [f"{run['tokens_per_second']['median']:.1f}" for run in runs])
        if is_plain(runs[0]):
            axes.axvline(runs[0]["tokens_per_second"]["median"], color=SENTINELS["plain"], linewidth=1, linestyle=":")
        axes.set_xlabel(f"decoded tokens per second{' and request' if (runs[0].get('concurrency') or 1) > 1 else ''}")
        svg = to_svg(figure, f"Decoded tokens per second by run, {group.title}.")
        caption = f"Median over prompts, with minimum and maximum; dotted: plain decoding.{note}"
        return Plot("Tokens per second", caption, svg)


def _iterations(group: Group, note: str) -> Plot | None:
    rows = []
    for run in group.rows:
        seconds, count = run.get("seconds") or {}, run.get("rounds") or run.get("iterations")
        if count and seconds.get("verify") is not None:
            rows.append((run, {part: 1000 * (seconds.get(part) or 0.0) / count for part in PARTS}))
    if not rows:
        return None
    shown = [part for part in PARTS if part != "begin" or any(parts["begin"] > 0 for _, parts in rows)]
    with matplotlib.rc_context(STYLE):
        figure, axes = bar_figure([run["label"] for run, _ in rows])
        lefts = [0.0] * len(rows)
        for part in shown:
            widths = [parts[part] for _, parts in rows]
            color, label = SENTINELS[f"part-{part}"], PARTS[part]
            axes.barh(range(len(rows)), widths, left=lefts, color=color, height=0.62, label=label)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        taus = [run.get("mean_acceptance_length") or 1.0 for run, _ in rows]
        texts = [f"{total / tau:.1f} ms/token" for total, tau in zip(lefts, taus, strict=True)]
        bar_values(axes, lefts, texts, room=1.5)
        if is_plain(rows[0][0]):
            axes.axvline(lefts[0], color=SENTINELS["plain"], linewidth=1, linestyle=":")
        axes.set_xlabel("milliseconds per iteration")
        add_legend(figure, axes, columns=len(shown), length=1.2)
        svg = to_svg(figure, f"Milliseconds per iteration by what they were spent on, {group.title}.")
        caption = f"One target pass, the draft, the rest. Over tau: the time of a token. Dotted: a plain step.{note}"
        return Plot("Time of an iteration", caption, svg)
