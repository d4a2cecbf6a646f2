"""What measured acceptance would be worth on a device that is not here, by its roofline."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.drafts.base import Draft
from drafttrain.drafts.kd import KdDraft
from drafttrain.evaluate.roofline import (
    FAMILIES,
    DraftShape,
    Roofline,
    assumptions,
    find_device,
    layer_seconds_on,
    predict,
    shape_of,
)
from drafttrain.target import Target


def rooflines(
    report: Mapping[str, Any],
    target: Target,
    shapes: Mapping[str, DraftShape],
    devices: Sequence[str],
    context: float = 1024,
) -> list[dict[str, Any]]:
    """For each device and draft, `predict` with the acceptance of its deepest greedy chain at the smallest concurrency.

    shapes: {kind as in the report: the draft's config or shape, None for lookup}. context: cached tokens of a request.
    Each gains "layer_seconds", what a layer is assumed to take besides its bytes: of a small model's row as `plan` has
    it, 0 of the others, whose drafts are one layer or none. Nothing for a draft that was never accepted. RooflineError
    for a device or target that has no numbers.
    """
    found = []
    for name in devices:
        device = find_device(name)
        for kind, shape in shapes.items():
            # Of a small model the layers are so cheap that their kernels' starts count: `plan` reckons alike.
            each = layer_seconds_on(device) if kind == "kd" else 0.0
            roofline = Roofline(device, layer_overhead=each)
            run = _deepest(report["runs"], kind)
            if run is not None:
                rates = run["per_position_acceptance"]
                predicted = predict(roofline, target.config, shape, rates, context=context)
                facts = {"context": context, "layer_seconds": each, "per_position_acceptance": rates}
                found.append({"label": run["label"], **facts, **predicted})
    return found


def counted_shape(draft: Draft) -> DraftShape:
    """What the roofline counts of a draft: its config, of a small model whose head has some words alone a shape."""
    if isinstance(draft, KdDraft) and not draft.whole_vocabulary and draft.shape.model_type in FAMILIES:
        return shape_of(draft.shape, draft.draft_vocab_size)
    return draft.shape


def _deepest(runs: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    """The trained (or lookup's) exact chain with the largest K, at the first sampling and smallest concurrency."""
    chains = [
        run
        for run in runs
        if run["draft"] == kind and not (run["tree"] or run["policy"] or run["lossy"] or run.get("quantization"))
        if (run["trained"] or kind == "ngram") and run["per_position_acceptance"]
    ]
    return max(chains, key=lambda run: (-run["concurrency"], run["mode"] == "greedy", run["k"]), default=None)


def print_rooflines(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table for each device and draft: the best K and its speedup at each concurrency, and what was assumed."""
    for entry in found:
        draft = entry["label"].rsplit(" k=", 1)[0]
        title = f"Predicted on {entry['device']}, {draft}, {entry['context']:g} cached tokens"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
        for name in ("concurrency", "best K", "tau", "speedup", "v", "c"):
            table.add_column(name, justify="right")
        for row in entry["best"]:
            cells = [f"{row['tau']:.2f}", f"{row['speedup']:.2f}x", f"{row['v']:.2f}", f"{row['c']:.3f}"]
            table.add_row(str(row["concurrency"]), str(row["k"]), *cells)
        console.print(table)
        stop = entry["break_even"]
        console.print(f"break-even: {'none up to that' if stop is None else f'{stop:.0f} requests at a time'}")
        line = f"assumed: {assumptions(entry['device'], entry['layer_seconds'])}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
