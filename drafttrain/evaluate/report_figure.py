"""What the report's plots are drawn with: inline SVG whose colours are CSS variables, for light and dark alike.

Text stays text (selectable, in the page's font); nothing refers to anything outside the page.
"""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from drafttrain.evaluate.report_summary import Series

WIDTH = 4.3  # inches; about 310 points, so that 9-point text stays readable on a phone
CSS_COLORS = ("ink", "muted", "grid", "plain", "card", *(f"s{i}" for i in range(1, 9)), *(f"q{i}" for i in range(1, 8)))
CSS_COLORS += ("part-draft", "part-verify", "part-rest", "part-begin")
# Each CSS variable is drawn in a colour of its own that nothing else uses, and replaced in the SVG's text.
SENTINELS = {name: f"#0a0b{16 + index:02x}" for index, name in enumerate(CSS_COLORS)}
LEGEND_ROW = 0.17  # inches
DASHES = ((0, (3, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (6, 2)), (0, (3, 1.5, 1, 1.5, 1, 1.5)))
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "drafttrain",
    "text.parse_math": False,
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "legend.fontsize": 9.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": SENTINELS["ink"],
    "axes.labelcolor": SENTINELS["muted"],
    "xtick.color": SENTINELS["muted"],
    "ytick.color": SENTINELS["muted"],
    "axes.edgecolor": SENTINELS["grid"],
    "grid.color": SENTINELS["grid"],
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
}


@dataclass(frozen=True)
class Plot:
    """One figure of the page."""

    title: str
    caption: str
    svg: str


def line_style(one: Series) -> dict[str, Any]:
    """Keyword arguments of Axes.plot; lossy and synthetic series are faint."""
    face = SENTINELS["card" if one.dashed else one.color]
    dash = DASHES[(one.style - 1) % len(DASHES)] if one.dashed else "-"
    look = {"color": SENTINELS[one.color], "marker": one.marker, "markerfacecolor": face, "linestyle": dash}
    return look | {"alpha": 0.55 if one.mark else 1.0}


def new_figure(height: float) -> tuple[Figure, Axes]:
    """height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def bar_figure(labels: Sequence[str], pitch: float = 0.24) -> tuple[Figure, Axes]:
    """Horizontal rows, the first on top; pitch: inches of each."""
    figure, axes = new_figure(0.75 + pitch * len(labels))
    short = [label if len(label) <= 26 else label[:25] + "…" for label in labels]
    axes.set_yticks(range(len(labels)), short, color=SENTINELS["ink"])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def bar_values(axes: Axes, ends: Sequence[float], texts: Sequence[str], room: float = 1.22) -> None:
    """The figure of each bar, right of where the bar ends."""
    axes.set_xlim(0, max(ends) * room)
    for row, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.text(end + 0.02 * max(ends) * room, row, text, va="center", ha="left", fontsize=8.5)


def add_legend(figure: Figure, axes: Axes, columns: int = 2, length: float = 2.0) -> None:
    """Above the plot, in one column where two would not fit; the figure grows by what more than two rows take."""
    handles, labels = axes.get_legend_handles_labels()
    if columns == 2 and max((len(label) for label in labels), default=0) > 27:
        columns = 1
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * max(rows - 2, 0))
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, handlelength=length, columnspacing=1.0, borderpad=0
    )


def to_svg(figure: Figure, description: str) -> str:
    """The figure as an <svg> element: no prolog, no links, own ids, CSS variables for colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style type.*?</style>", "", text, flags=re.S)
    view_box = re.search(r'viewBox="[^"]+"', text).group()
    text = re.sub(r"<svg[^>]*>", f'<svg {view_box} role="img" aria-label="{html.escape(description)}">', text, count=1)
    prefix = re.sub(r"\W+", "-", description.lower()).strip("-")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(r"font: (?:([\w-]+) )?([\d.]+)px [^;\"]+", lambda m: f"font-size: {m[2]}px", text)
    for name, sentinel in SENTINELS.items():
        text = text.replace(sentinel, f"var(--{name})")
    return text.strip()
