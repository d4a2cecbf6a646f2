"""The cost of a training in the terminal: what it is made of, what is assumed, warnings last."""

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.data.store import GIB
from drafttrain.plan_cost import stated
from drafttrain.plan_print import millions

SHOWN_RUNS = 8
BESIDE = {
    "cpu": "tensors alone: beside them libraries (some 100 MiB) and the heap's holes, measured at up to 40% more",
    "cuda": "tensors alone: beside them the CUDA context and the allocator's fragments",
}
"""What the sums leave out; scripts/bench_plan.py measures the CPU's share."""


def print_cost(found: Mapping[str, Any], console: Console) -> None:
    """Parameters, memory, storage, compute, acceptance; then warnings and suggestions."""
    target = found["target"]
    console.print(f"Training {found['method']} for {target['name']}", style="bold", highlight=False, markup=False)
    _section(console, "parameters", _parameters(found))
    _section(console, "data", [_data(found["data"], found["flops"])])
    _memory(found["memory"], console)
    for title, lines in (
        ("storage", [_storage(found["storage"])]),
        ("compute", _compute(found)),
        ("acceptance", _acceptance(found["acceptance"])),
        ("suggested", [f"{row['key']}: {row['value']}  ({row['why']})" for row in found["suggestions"]]),
    ):
        _section(console, title, lines)
    for line in found["warnings"]:
        console.print(f"WARNING {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _section(console: Console, title: str, lines: list[str]) -> None:
    for i, line in enumerate(lines):
        name = title if i == 0 else ""
        console.print(f"{name:<11}{line}", highlight=False, markup=False, soft_wrap=True)


def _parameters(found: Mapping[str, Any]) -> list[str]:
    target, draft = found["target"], found["draft"]
    parts = ", ".join(
        f"{part['name']} {millions(part['parameters'])}{'' if part['trained'] else ' frozen'}"
        for part in draft["parts"]
    )
    stored = f"quantised ({target['quantised']}), " if target["quantised"] else ""
    frozen = f", {millions(draft['frozen'])} frozen" if draft["frozen"] else ""
    return [
        f"draft {millions(draft['trained'])} trained{frozen}: {parts}",
        f"target {millions(target['parameters'])} frozen, {stored}{target['bytes'] / GIB:.2f} GiB as {target['dtype']}",
    ]


def _data(data: Mapping[str, Any], flops: Mapping[str, Any]) -> str:
    word = "ASSUMED" if data["assumed"] else "counted"
    note = f"; {flops['note']}" if flops["note"] else ""
    return (
        f"{data['tokens']:,} tokens in {data['rows']:,} rows ({word}: {data['how']}); {flops['trained']:,} trained on "
        f"in {flops['epochs']:.3g} epochs, about {flops['steps']:,} steps{note}"
    )


def _memory(memory: Mapping[str, Any], console: Console) -> None:
    N = memory["processes"]
    columns = {"alone": memory["alone"]} if not memory["engines"] else memory["engines"]
    names = list(dict.fromkeys(name for facts in columns.values() for name in facts["parts"]))
    many = f" a process, {N} processes" if N > 1 else ""
    if memory["spread"] > 1:
        many += f", on the fullest of the {memory['spread']} devices that hold the target (target.device_map)"
    _section(console, "memory", [f"GiB{many}, {memory['tokens_per_batch']:,} tokens a batch"])
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), show_header=N > 1)
    table.add_column("")
    for name in columns:
        table.add_column(name if N > 1 else "", justify="right")
    for part in names:
        table.add_row(f"{'':<11}{part}", *(f"{facts['parts'].get(part, 0) / GIB:.2f}" for facts in columns.values()))
    table.add_row(f"{'':<11}peak", *(f"{facts['peak'] / GIB:.2f}" for facts in columns.values()), style="bold")
    table.add_row(f"{'':<11}reached in", *(facts["moment"] for facts in columns.values()))
    console.print(table)
    console.print(f"{'':<11}{BESIDE[memory['device']]}", highlight=False, markup=False, soft_wrap=True)


def _storage(storage: Mapping[str, Any]) -> str:
    size = storage["bytes"] / GIB
    what = f"{storage['bytes_per_token']:,} bytes a token ({storage['of']}), {size:,.1f} GiB for all"
    if not storage["written"]:
        return f"none written (features.source {storage['source']}); a store would take {what}"
    written = "" if storage["written"] == storage["bytes"] else f", {storage['written'] / GIB:,.1f} GiB of them written"
    return f"{what}{written}; {storage['free'] / GIB:,.1f} GiB free"


def _compute(found: Mapping[str, Any]) -> list[str]:
    flops, giga = found["flops"], 1e9
    lines = [
        f"{flops['total']:.2e} FLOPs; a token: target {flops['target'] / giga:.2f} GFLOPs, its head "
        f"{flops['statistics'] / giga:.2f}, draft {flops['draft'] / giga:.2f}, draft's and teacher's rows "
        f"{flops['head'] / giga:.2f}"
    ]
    for row in found["hours"]:
        lines.append(
            f"{row['device']}: {_hours(row['device_hours'])} of one device (target {_hours(row['target'])}, draft "
            f"{_hours(row['draft'])}), {_hours(row['wall_hours'])} on the wall"
        )
    spread = found["memory"]["spread"]
    if spread > 1:
        lines.append(f"a process holds {spread} devices, which take turns: {spread} times as many hours are paid")
    if found["hours"]:
        lines.append(f"at {stated(found['hours'])}; validation, measuring and saving not counted")
    for row in found["regeneration"]:
        cost = f"not planned: {row['reason']}" if row["hours"] is None else f"{_hours(row['hours'])} of one device"
        lines.append(
            f"regeneration on {row['device']}, apart from that: {row['tokens']:,} tokens, {row['batch']} answers at a "
            f"time (KV cache about {row['kv_cache'] / GIB:.1f} GiB), {cost} (roofline)"
        )
    return lines


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.1f} s"


def _acceptance(found: Mapping[str, Any]) -> list[str]:
    if found["low"] is None:
        first = f"no published acceptance length of {found['method']} chains is known to this plan; published speedups:"
    else:
        first = f"published chains for {found['of']}: {found['low']:.2f} to {found['high']:.2f} tokens a target forward"
    if not found["runs"]:
        return [f"nothing is published for {found['method']} that this plan knows of"]
    chains = [run for run in found["runs"] if run["chain"] and run["tau"] is not None]
    others = [run for run in found["runs"] if run not in chains]
    lines = [first, *map(_published, chains[:SHOWN_RUNS])]
    if chains and others:
        lines.append("trees, whose length is that of their best path, and speedups alone:")
    return [*lines, *map(_published, others[:SHOWN_RUNS])]


def _published(run: Mapping[str, Any]) -> str:
    tau = "" if run["tau"] is None else f" tau {_range(run['tau'])}"
    k = f" K = {run['k']}" if run["k"] else ""
    speedup = f" {run['speedup']}" if run["speedup"] else ""
    return f"  {run['target']}:{tau}{k}{speedup}  {run['how']} [{run['source']}]"


def _range(pair: tuple[float, float]) -> str:
    low, high = pair
    return f"{low:.2f}" if low == high else f"{low:.2f}-{high:.2f}"


def next_step(found: Mapping[str, Any]) -> str:
    """The last line: what it comes to, and the next command."""
    where = f"{found['memory']['alone']['peak'] / GIB:.1f} GiB on one process"
    hours = "".join(f", {_hours(row['device_hours'])} on {row['device']}" for row in found["hours"][:1])
    recipe = found["recipe"] or "RECIPE"
    return f"planned: {where}{hours}; nothing was written. Next: drafttrain prepare {shlex.quote(recipe)}"
