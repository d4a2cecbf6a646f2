"""Writes report.json and a self-contained report.html, and prints the same figures as a table in the terminal.

The dict's keys are those of report.json, schema 1; figures are named and computed as in the page's glossary.
"""

import errno
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from drafttrain.data.files import write_beside
from drafttrain.errors import UserError
from drafttrain.evaluate import report_plots, report_summary, report_sweeps, report_tables, report_words
from drafttrain.evaluate.report_summary import MISSING, Group, Run, interval_of, number, percent

DIVERGENCES_SHOWN = 60
REPORT_FILES = ("report.json", "report.html")


class EvaluationError(UserError):
    """An evaluation that cannot be run as asked, or whose report cannot be written."""


def check_writable(folder: Path) -> None:
    """Makes the folder, writes a probe and removes both again, so that hours of measuring do not end without a report.

    Raises EvaluationError if the folder cannot be made or written, or if a folder stands where a report belongs.
    """
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"x")
        for name in REPORT_FILES:
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))
        for part in missing:
            part.rmdir()
    except OSError as error:
        raise _unwritable(folder, error) from error


def command_line(arguments: Sequence[str]) -> str:
    """The command as a report names it: with its --api-key hidden."""
    return re.sub(r"(--api-key[= ])\S+", r"\1HIDDEN", " ".join(arguments))


def write_report(
    report: Mapping[str, Any], folder: Path, training_log: Sequence[Mapping[str, Any]] | None = None
) -> tuple[Path, Path]:
    """Writes folder/report.json and folder/report.html (made if missing); returns both paths.

    report: schema 1, values None where not measured; numbers that are not finite are written as null.
    training_log: rows of the run's log.jsonl ("step", "minutes", "loss", "step_acceptance/k", ...), or None.
    Raises EvaluationError if the folder cannot be written. A file appears whole or not at all.
    """
    report = _finite(report)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    page = render_html(report, training_log)
    json_path, html_path = (folder / name for name in REPORT_FILES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in ((json_path, text), (html_path, page)):
            write_beside(path, lambda beside, content=content: beside.write_text(content, encoding="utf-8"))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return json_path, html_path


def _unwritable(folder: Path, error: OSError) -> EvaluationError:
    return EvaluationError(
        f"cannot write the report into {folder}: {error.strerror}. Expected a folder that can be made and written "
        "to: mend its permissions or free space, or name another one (--output)."
    )


def _finite(value: Any) -> Any:
    """The same value in plain JSON types; NaN and infinities become None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def render_html(report: Mapping[str, Any], training_log: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The page as one string: style and plots inline, no script, nothing loaded from elsewhere.

    report: schema 1, with drafts of any kinds and checkpoints; "comparisons": [{"a", "b", "k", "sampling",
    "concurrency", "tau_difference": {"value", "interval"}, "speedup_ratio": {"value", "interval"}}] become a table.
    """
    report = report_summary.complete(report)
    groups = report_summary.group_runs(report["runs"])
    series = report_summary.series_of(report["runs"])
    found = report_summary.divergences(groups)
    certificate = report_words.certificate_words(report["certificate"])
    predicted = report_tables.predictions(groups)
    return (
        _environment()
        .from_string(_resource("report.html.j2"))
        .render(
            style=Markup(_resource("report.css")),
            **{name: report[name] for name in ("target", "device", "engine", "prompts", "provenance")},
            best=report_summary.headline(report, groups),
            warnings=_notes(report, groups, certificate),
            groups=[_section(group, series) for group in groups],
            sweeps=[
                {**section, "plots": report_sweeps.concurrency_plots(section["title"], section["groups"], series)}
                for section in report_tables.concurrency_sections(report, groups)
            ],
            comparisons=report_tables.comparisons(report),
            predicted=predicted,
            prediction_plot=report_sweeps.prediction_plot(predicted["rows"], series) if predicted else None,
            tuned=report_tables.tuned(report),
            rooflines=report_tables.rooflines(report),
            series=series,
            training=report_plots.training_plots(training_log or ()),
            divergences=found[:DIVERGENCES_SHOWN],
            divergence_count=len(found),
            certificate=certificate,
            glossary=report_words.glossary(report["runs"]),
            recipe=yaml.safe_dump(report["provenance"]["recipe"] or {}, sort_keys=False),
        )
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(number=number, percent=percent, interval_of=interval_of)
    environment.globals.update(output_text=report_summary.output_text, impossible=report_summary.is_impossible)
    environment.globals.update(is_plain=report_summary.is_plain, mark_of=report_summary.mark_of)
    environment.globals.update(mean_drafted=report_tables.mean_drafted, gibibytes=report_tables.gibibytes)
    environment.globals.update(milliseconds=report_tables.milliseconds)
    environment.filters["svg"] = Markup
    return environment


def _section(group: Group, series: Mapping[str, report_summary.Series]) -> dict[str, Any]:
    plots = [*report_plots.group_plots(group, series), report_sweeps.category_plot(group, series)]
    return {
        "group": group,
        "plots": [plot for plot in plots if plot is not None],
        "scale": _scale(group),
        "categories": report_tables.categories(group),
        **report_tables.details(group),
    }


def _notes(report: Mapping[str, Any], groups: list[Group], certificate: Mapping[str, Any] | None) -> list[dict]:
    """The warnings, a failed certificate first."""
    failed = []
    if certificate and not certificate["passed"]:
        text = (
            f"{certificate['line']}. The sampler does not keep the target's distribution, or the checks could not show "
            "it: no figure of this report counts as lossless."
        )
        failed.append({"level": "bad", "title": "The losslessness certificate failed", "text": text})
    return failed + report_words.warnings(report, groups)


def _resource(name: str) -> str:
    return resources.files("drafttrain.evaluate").joinpath(name).read_text(encoding="utf-8")


def _scale(group: Group) -> tuple[float, float]:
    """The speedups at the ends of the small interval drawings: one scale for a whole table."""
    values = [1.0]
    for run in group.runs:
        values += [value for value in (run["speedup"], *(interval_of(run, "speedup") or ())) if value is not None]
    return 0.95 * min(values), 1.05 * max(values)


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """Prints one table per sampling mode and concurrency, the baseline first; below them the certificate's verdict and
    the report's warnings. A console narrower than 100 columns gets neither ranges nor acceptance rates."""
    report = report_summary.complete(report)
    groups = report_summary.group_runs(report["runs"])
    for group in groups:
        console.print(_table(report, group, console.width >= 100))
        console.print()
    certificate = report_words.certificate_words(report["certificate"])
    if certificate is not None:
        style = "green" if certificate["passed"] else "bold red"
        console.print(f"certificate: {certificate['line']}", style=style, markup=False, highlight=False)
    for warning in report_words.warnings(report, groups):
        style = {"bad": "red", "warn": "yellow", "info": "dim"}[warning["level"]]
        console.print(f"{warning['title']}: {warning['text']}", style=style, markup=False, highlight=False)


def _table(report: Mapping[str, Any], group: Group, wide: bool) -> Table:
    names = ("tau", "accepted", "tokens/s (range)", "speedup [95%]", "c", "v", "output")
    padding = (0, 2 if wide else 1, 0, 0)
    table = Table(title=group.title, title_justify="left", title_style="bold", box=None, padding=padding)
    table.header_style = "dim"
    table.add_column("run", no_wrap=True)
    for name in names if wide else ("tau", "tokens/s", *names[3:]):
        table.add_column(name, justify="left" if name == "output" else "right", no_wrap=True)
    best = report_summary.headline(report, [group])["run"]
    for run in group.rows:
        table.add_row(*_cells(run, wide), style="bold" if run is best else None)
    return table


def _cells(run: Run, wide: bool = True) -> list[str]:
    speed = run.get("tokens_per_second") or {}
    spread = (
        f" ({number(speed.get('min'), 1)}-{number(speed.get('max'), 1)})"
        if wide and speed.get("min") is not None
        else ""
    )
    pair = interval_of(run, "speedup")
    bounds = f" [{pair[0]:.2f}, {pair[1]:.2f}]" if pair else ""
    plain = report_summary.is_plain(run)
    mark = " impossible" if report_summary.is_impossible(run) else ""
    return [
        run["label"].replace("[", r"\["),
        number(run.get("mean_acceptance_length")),
        *([MISSING if plain else percent(run.get("acceptance_rate"))] if wide else []),
        number(speed.get("median"), 1) + spread,
        "1 (baseline)" if plain else number(run.get("speedup"), 2, "x") + bounds.replace("[", r"\[") + mark,
        MISSING if plain else number(run.get("c"), 3),
        MISSING if plain else number(run.get("v")),
        report_summary.output_text(run),
    ]
