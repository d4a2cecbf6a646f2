"""Writes report.json and a self-contained report.html, and prints the same figures as a table in the terminal.

The dict's keys are those of report.json, schema 1; figures are named and computed as in the page's glossary.
"""

import json
import math
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
from drafttrain.evaluate import report_plots, report_summary
from drafttrain.evaluate.report_summary import MISSING, Group, Run, interval_of, number, percent

DIVERGENCES_SHOWN = 60


class EvaluationError(UserError):
    """An evaluation that cannot be run as asked, or whose report cannot be written."""


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
    json_path, html_path = folder / "report.json", folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in ((json_path, text), (html_path, page)):
            write_beside(path, lambda beside, content=content: beside.write_text(content, encoding="utf-8"))
    except OSError as error:
        raise EvaluationError(
            f"cannot write the report into {folder}: {error.strerror}. Expected a folder that can be made and written "
            "to: mend its permissions or free space, or name another one (--output)."
        ) from error
    return json_path, html_path


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
    """The page as one string: style and plots inline, no script, nothing loaded from elsewhere."""
    report = report_summary.complete(report)
    groups = report_summary.group_runs(report["runs"])
    series = report_summary.series_of(report["runs"])
    found = report_summary.divergences(groups)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        number=number, percent=percent, interval_of=interval_of, output_text=report_summary.output_text
    )
    environment.globals.update(impossible=report_summary.is_impossible, is_plain=report_summary.is_plain)
    environment.filters["svg"] = Markup
    return environment.from_string(_resource("report.html.j2")).render(
        style=Markup(_resource("report.css")),
        **{name: report[name] for name in ("target", "device", "prompts", "provenance")},
        best=report_summary.headline(report, groups),
        warnings=report_summary.warnings(report, groups),
        groups=[
            {
                "group": group,
                "plots": report_plots.group_plots(group, series),
                "scale": _scale(group),
                "positions": max((len(run.get("per_position_acceptance") or ()) for run in group.runs), default=0),
            }
            for group in groups
        ],
        series=series,
        training=report_plots.training_plots(training_log or ()),
        categories=_categories(report["runs"]),
        divergences=found[:DIVERGENCES_SHOWN],
        divergence_count=len(found),
        certificate=_flatten(report["certificate"]),
        glossary=report_summary.GLOSSARY,
        recipe=yaml.safe_dump(report["provenance"]["recipe"] or {}, sort_keys=False),
    )


def _resource(name: str) -> str:
    return resources.files("drafttrain.evaluate").joinpath(name).read_text(encoding="utf-8")


def _scale(group: Group) -> tuple[float, float]:
    """The speedups at the ends of the small interval drawings: one scale for a whole table."""
    values = [1.0]
    for run in group.runs:
        values += [value for value in (run["speedup"], *(interval_of(run, "speedup") or ())) if value is not None]
    return 0.95 * min(values), 1.05 * max(values)


def _categories(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of the table by kind of prompt: a category's figures by name, or a bare number, its speedup."""
    names = ("speedup", "mean_acceptance_length", "acceptance_rate")
    rows = []
    for run in runs:
        for category, values in (run["categories"] or {}).items():
            figures = values if isinstance(values, Mapping) else {"speedup": values}
            rows.append({"label": run["label"], "category": category, **{name: figures.get(name) for name in names}})
    return rows


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested mapping as (dotted name, printed value) pairs."""
    rows = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            rows += _flatten(item, f"{prefix}{key}.")
        elif isinstance(item, bool):
            rows.append((f"{prefix}{key}", "yes" if item else "no"))
        else:
            rows.append((f"{prefix}{key}", f"{item:.4g}" if isinstance(item, float) else str(item)))
    return rows


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """Prints one table per sampling mode, the baseline first, and the report's warnings below. A console narrower than
    100 columns gets neither ranges nor acceptance rates."""
    report = report_summary.complete(report)
    groups = report_summary.group_runs(report["runs"])
    wide = console.width >= 100
    names = ("tau", "accepted", "tokens/s (range)", "speedup [95%]", "c", "v", "output")
    for group in groups:
        padding = (0, 2 if wide else 1, 0, 0)
        table = Table(title=group.title, title_justify="left", title_style="bold", box=None, padding=padding)
        table.header_style = "dim"
        table.add_column("run", no_wrap=True)
        for name in names if wide else ("tau", "tokens/s", *names[3:]):
            table.add_column(name, justify="left" if name == "output" else "right", no_wrap=True)
        best = report_summary.headline(report, [group])["run"]
        for run in group.rows:
            table.add_row(*_cells(run, wide), style="bold" if run is best else None)
        console.print(table)
        console.print()
    for warning in report_summary.warnings(report, groups):
        console.print(f"{warning['title']}: {warning['text']}", style="yellow", markup=False, highlight=False)


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
