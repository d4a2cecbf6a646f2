"""Plans in the terminal: a table of sizes, what stands behind it, and the line that says what to do next."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.evaluate.roofline import assumptions

COLUMNS = ("size", "body", "table", "MB read", "c", "+-", "best K", "tau", "speedup", "pays from", "ties at")


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """The sizes, best first, and in words what is assumed and what the target's own step consists of."""
    target, how = plan["target"], "measured" if plan["measured"] else "roofline"
    rows = f", {plan['concurrency']} requests at a time" if plan["concurrency"] > 1 else ""
    title = f"Small drafts for {target['name']} on {plan['device']} ({how}{rows}, {plan['context']} tokens before)"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "size" else "right", no_wrap=True)
    for entry in plan["sizes"]:
        best, spread = entry["best"], entry["c_range"]
        cells = [millions(entry["body"]), millions(entry["table"]), f"{entry['forward_bytes'] / 1e6:,.1f}"]
        cells += [f"{best['c']:.3f}", f"{(spread[1] - spread[0]) / sum(spread):.0%}" if spread else ""]
        cells += [str(best["k"]), f"{best['tau']:.2f}", f"{best['speedup']:.2f}x"]
        cells += [_rate(entry["break_even_acceptance"]), _rate(entry["acceptance_to_tie"])]
        table.add_row(entry["label"], *cells, style="bold" if entry["label"] == plan["best"] else None)
    console.print(table)
    console.print()
    for line in _lines(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(plan: Mapping[str, Any]) -> list[str]:
    step, (low, high), head, target = plan["plain_step"], plan["plain_range"], plan["head"], plan["target"]
    spread = f" ({1000 * low:.3g}-{1000 * high:.3g})" if plan["measured"] else ""
    deepest = max(plan["sizes"], key=lambda entry: len(entry["v"]))
    v = ", ".join(f"{value:.2f}" for value in deepest["v"][1:])
    lines = [
        f"acceptance is ASSUMED, not measured: {_assumed(plan['sizes'])}. Larger students are accepted more often: "
        "compare what each pays from (the acceptance, given the draft before, at which it breaks even) and where it "
        "ties with the best of the others",
        f"plain step of the target: {1000 * step:.3g} ms{spread}; its head over {target['vocab_size']:,} words takes "
        f"{head['share_of_step']:.2f} of it and is {head['share_of_bytes']:.0%} of the weights that it reads",
        f"verifying costs v(K) = {v} plain steps at K = 1 to {len(deepest['v']) - 1}, the rest o = "
        f"{deepest['o']:.2f}; c per drafted token at the best K"
        + (", +- over the repeats at the deepest" if plan["measured"] else ""),
    ]
    if not plan["measured"]:
        assumed = assumptions(plan["device"], plan["layer_seconds"])
        lines.append(f"roofline, so assumed: {assumed}; measure on the device before you rely on it")
    if plan["draft_vocab"] is not None:
        lines.append(
            f"draft vocabulary of {plan['draft_vocab']:,} words: so this package drafts; engines serve a small draft "
            "with its whole head"
        )
    return lines


def _assumed(sizes: Sequence[Mapping[str, Any]]) -> str:
    given = {entry["label"]: _rates(entry["acceptance"]) for entry in sizes}
    if len(set(given.values())) == 1:
        return next(iter(given.values())) + " for every size"
    return "; ".join(f"{label} {rates}" for label, rates in given.items())


def _rates(joint: Sequence[float]) -> str:
    first = joint[0]
    if all(abs(rate - first ** (i + 1)) < 1e-9 for i, rate in enumerate(joint)):
        return f"{first:g} given the draft before"
    return "joint rates " + " ".join(f"{rate:g}" for rate in joint)


def _rate(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def millions(count: int) -> str:
    """A number of parameters for a table."""
    return f"{count / 1e6:,.1f}M" if count >= 1e5 else f"{count / 1e3:,.1f}k"


def print_student(found: Mapping[str, Any], console: Console) -> None:
    """Predicted speedup at each K, with the measured one beside it where there is a report."""
    measured = "measured" in found["predictions"][0]
    title = f"{found['label']}: predicted from its own costs on {found['device']}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
    for name in ("K", "tau", "c", "v", "o", "predicted", *(("measured", "error") if measured else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["predictions"]:
        cells = [f"{row['tau']:.2f}", f"{row['c']:.3f}", f"{row['v']:.2f}", f"{row['o']:.2f}", f"{row['speedup']:.2f}x"]
        cells += [f"{row['measured']:.2f}x", f"{row['error']:+.1%}"] if measured else []
        table.add_row(str(row["k"]), *cells)
    console.print(table)
    console.print()
    low, high = found["c_range"]
    line = (
        f"plain step {1000 * found['plain_step']:.3g} ms; c of the deepest K {low:.3f} to {high:.3f} over the repeats"
    )
    if measured:
        line += f"; median error {found['median_error']:.1%}"
    else:
        line += "; the acceptance is ASSUMED, not measured"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def advice(plan: Mapping[str, Any], recipe: str | None, reset: Mapping[str, str] | None = None) -> str:
    """The last line: the winner and the command that trains it, or why none pays and what else there is.

    recipe: the arguments that name one in the next command, None where only a target was given; reset: {dotted key:
    value} of what that recipe says and a student of another kind refuses.
    """
    if plan["best"] is None:
        where = "" if plan["draft_vocab"] is not None else ", a draft vocabulary (--draft-vocab 32000 plans with one)"
        other = f"Mend: a larger target{where}, or a draft that reads the target's features (method: eagle3)"
        return f"{plan['device']}: {plan['reason']}. {other}"
    top = plan["sizes"][0]
    best = top["best"]
    said = (
        f"{plan['device']}: {top['label']} is predicted best, {best['speedup']:.2f}x at K = {best['k']}, if its "
        f"acceptance is as assumed; it pays from an acceptance of {_rate(top['break_even_acceptance'])}"
    )
    if len(plan["sizes"]) > 1:
        said += f", and from {_rate(top['acceptance_to_tie'])} beats {plan['sizes'][1]['label']}"
    if recipe is None:
        keys = ", ".join(f"{key}: {value}" for key, value in top["draft"].items())
        return f"{said}. Next: a recipe with `method: kd` and `draft: {{{keys}}}`, then drafttrain train RECIPE"
    keys = {**(reset or {}), **{f"draft.{key}": str(value) for key, value in top["draft"].items()}}
    if plan["draft_vocab"] is not None:
        keys["data.draft_vocab"] = str(plan["draft_vocab"])
    return f"{said}. Next: drafttrain train {recipe} {' '.join(f'{key}={value}' for key, value in keys.items())}"
