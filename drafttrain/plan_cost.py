"""`drafttrain plan RECIPE`: what a training costs before anything is spent, from the recipe and the target's config.

Parameters, memory of a process, feature storage, data, FLOPs and device hours, regeneration, published acceptance,
warnings and suggestions. Nothing is loaded, downloaded (a hub id's config apart) or written.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from drafttrain.data.features import DTYPES
from drafttrain.data.sources import needs_statistics
from drafttrain.data.store import GIB, Key, StoreKey, bytes_per_token
from drafttrain.data.teacher_cache import TopKKey
from drafttrain.evaluate.roofline import Device, find_device
from drafttrain.plan_activations import Setting
from drafttrain.plan_candidates import PlanError
from drafttrain.plan_compute import (
    CPU_UTILISATION,
    UTILISATION,
    Flops,
    Work,
    flops_of,
    hours_of,
    regeneration,
    work_of,
)
from drafttrain.plan_data import Volume, volume
from drafttrain.plan_memory import ENGINES, Memory, step_memory
from drafttrain.plan_published import band, method_of
from drafttrain.plan_shapes import DraftOutline, outline_draft
from drafttrain.plan_target import TargetOutline, outline_target
from drafttrain.recipe import Recipe

TERABYTE = 1e12
USABLE = 0.9
"""Of a device's memory, the share that a plan fills: the allocator's fragments and the libraries need the rest."""
STEP_TOKENS = 1024
"""Suggested batches are multiples of it."""
MOST_TOKENS = 65536
MOST_DEVICES = 64
"""Over which a process may spread the target."""
WORTH_STORING = 0.2
"""Storing is suggested from this share of the device hours on."""


def plan_cost(
    recipe: Recipe,
    *,
    device: str | None = None,
    processes: int = 1,
    tokens: int | None = None,
    utilisation: float | None = None,
    output: Path | None = None,
    rates: bool = True,
) -> dict[str, Any]:
    """The whole plan, json-able; see the keys below. device: of evaluate/roofline.py's table, "cpu", or names separated
    by commas, the first of which memory is planned for; None: what the recipe would train on here. tokens: of the
    training data, in place of counting. utilisation: share of a device's peak. output: where the run will lie. rates
    False: no device hours (on a CPU they take a measurement of a second).

    {"recipe", "method", "target", "draft", "data", "memory": {"tokens_per_batch", "processes", "device", "alone",
    "engines": {name: ..}}, "storage", "flops", "hours": [of each device], "regeneration", "acceptance", "warnings",
    "suggestions"}. Raises PlanError, TargetError, DraftError, DataError or RooflineError for what cannot be planned.
    """
    names = _device_names(device, recipe)
    kind = "cpu" if names[0] == "cpu" else "cuda"
    if processes < 1 or (utilisation is not None and not 0 < utilisation <= 1):
        raise PlanError(
            f"--processes is {processes} and --utilisation {utilisation}; expected at least one process, and a share "
            "within 0 to 1"
        )
    target = outline_target(recipe.target, kind)
    draft = outline_draft(recipe, target)
    data = volume(recipe, tokens)
    storage = _storage(recipe, draft, target, data, output)
    work = work_of(recipe, data, processes, storage["stored_share"])
    flops = flops_of(recipe, draft, target, data)
    devices = [find_device(name) for name in names] if rates else []
    hours = [_hours(flops, work, one, utilisation, processes) for one in devices]
    memory = devices[0].memory if devices else None
    setting = setting_of(recipe, target, kind, data)
    target = _spread(recipe, draft, target, setting, memory)
    found = {
        "recipe": None if recipe.source_path is None else str(recipe.source_path),
        "method": recipe.method,
        "target": _target_facts(target),
        "draft": _draft_facts(draft),
        "data": data.facts(),
        "memory": _memory(recipe, draft, target, setting, processes),
        "storage": storage,
        "flops": {**asdict(flops), **asdict(work), "total": _total(flops, work)},
        "hours": hours,
        "regeneration": [row for one in devices if (row := regeneration(recipe, target, data, one))],
        "acceptance": band(method_of(recipe.method, recipe.draft.lora is not None), target.name),
    }
    found["warnings"] = _warnings(found, target, data, memory, processes)
    fits = lambda size, engine: _peak(recipe, draft, target, setting, size, engine, processes)  # noqa: E731
    found["suggestions"] = _suggestions(recipe, found, fits, memory, processes, data)
    return found


def _device_names(device: str | None, recipe: Recipe) -> list[str]:
    if device is not None:
        return [name.strip() for name in device.split(",")]
    asked = recipe.target.device
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return ["cpu"]
    if not torch.cuda.is_available():
        raise PlanError(f"target.device is {asked}, and there is no GPU here to name. Mend: --device H100")
    return [torch.cuda.get_device_name()]


def setting_of(recipe: Recipe, target: TargetOutline, kind: str, data: Volume | None = None) -> Setting:
    """What the formulas of memory need to know of a batch. kind: cuda or cpu; data: None for the longest rows that the
    recipe allows.
    """
    most = recipe.training.max_tokens_per_batch
    longest = recipe.data.max_length if data is None else data.longest
    return Setting(
        tokens=(data and data.batch) or most,
        length=min(longest, most),
        c=2 if recipe.training.bf16 else 4,
        device=kind,
        d=target.itemsize,
        f=DTYPES[recipe.features.dtype].itemsize,
    )


def _spread(
    recipe: Recipe, draft: DraftOutline, target: TargetOutline, setting: Setting, memory: float | None
) -> TargetOutline:
    """With target.device_map: over the fewest devices whose fullest one has room; over one where no number suffices."""
    if recipe.target.device_map is None or memory is None:
        return target
    for count in range(1, MOST_DEVICES + 1):
        wider = replace(target, devices=count)
        if step_memory(recipe, draft, wider, setting).peak <= USABLE * memory:
            return wider
    return target


def _target_facts(target: TargetOutline) -> dict[str, Any]:
    model = target.model
    return {
        "name": target.name,
        "parameters": target.parameters,
        "active_per_token": model.active + model.vocab * model.H,
        "bytes": target.bytes,
        "dtype": target.dtype,
        "quantised": target.quantised,
        "layers": len(model.layers),
        "hidden_size": model.H,
        "vocab_size": model.vocab,
        "notes": list(target.notes),
    }


def _draft_facts(draft: DraftOutline) -> dict[str, Any]:
    parts = [{"name": part.name, "parameters": part.parameters, "trained": part.trained} for part in draft.parts]
    return {
        "trained": draft.trained,
        "frozen": draft.frozen,
        "parts": parts,
        "steps": draft.steps,
        "feature_layers": list(draft.feature_layers),
        "head_rows": draft.head_rows,
    }


def _memory(recipe: Recipe, draft: DraftOutline, target: TargetOutline, setting: Setting, N: int) -> dict[str, Any]:
    alone = step_memory(recipe, draft, target, setting)
    engines = {}
    if N > 1:
        engines = {name: step_memory(recipe, draft, target, setting, name, N).facts() for name in ENGINES}
    facts = {"tokens_per_batch": setting.tokens, "processes": N, "device": setting.device, "spread": target.devices}
    return {**facts, "alone": alone.facts(), "engines": engines}


def _peak(recipe: Recipe, draft, target, setting: Setting, tokens: int, engine: str | None, N: int) -> Memory:
    return step_memory(recipe, draft, target, replace(setting, tokens=tokens), engine, N)


def _storage(recipe: Recipe, draft: DraftOutline, target: TargetOutline, data: Volume, output: Path | None) -> dict:
    """{"source", "bytes_per_token", "bytes": of all tokens, "written": what the recipe stores, "free", "folder",
    "stored_share", "of": in words}. Validation data is not counted.
    """
    features = recipe.features
    item, H = DTYPES[features.dtype].itemsize, target.model.H
    if features.source == "topk":
        key: Key = TopKKey("", features.top_k, "")
        of = f"{features.top_k} likeliest words (id and log-probability) and statistics"
    else:
        statistics, states = needs_statistics(recipe), len(draft.feature_layers) + 1
        key = StoreKey("", draft.feature_layers, features.dtype, "", statistics)
        of = f"{states} hidden state{'s' * (states > 1)} of {H} x {item} bytes"
        of += ", 8 bytes of teacher statistics" * statistics
    width = bytes_per_token(key, H)
    whole = width * data.tokens
    share, written = 0.0, 0
    if features.source in ("store", "vllm", "topk"):
        share, written = 1.0, whole
    elif features.source == "hybrid":
        written = min(whole, round(features.max_gib * GIB))
        share = written / whole
    folder = Path(output) if output is not None else _default_output(recipe)
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return {
        "source": features.source,
        "of": of,
        "bytes_per_token": width,
        "bytes": whole,
        "written": written,
        "stored_share": share,
        "folder": str(folder),
        "free": shutil.disk_usage(place).free,
    }


def _default_output(recipe: Recipe) -> Path:
    """Where `drafttrain train` puts the run of this recipe."""
    return Path("checkpoints") / (recipe.source_path.stem if recipe.source_path else "run")


def _total(flops: Flops, work: Work) -> float:
    return work.forwards * (flops.target + flops.statistics) + work.trained * flops.step


def _hours(flops: Flops, work: Work, device: Device, utilisation: float | None, N: int) -> dict[str, Any]:
    used = utilisation or (CPU_UTILISATION if device.name == "cpu" else UTILISATION)
    target = hours_of(work.forwards * (flops.target + flops.statistics), device, used)
    step = hours_of(work.trained * flops.step, device, used)
    return {
        "device": device.name,
        "utilisation": used,
        "utilisation_assumed": utilisation is None,
        "target": target,
        "draft": step,
        "device_hours": target + step,
        "wall_hours": (target + step) / N,
    }


def _warnings(found: dict, target: TargetOutline, data: Volume, memory: float | None, N: int) -> list[str]:
    storage, out = found["storage"], list(target.notes)
    written, free = storage["written"], storage["free"]
    if written > TERABYTE:
        out.append(
            f"features.source {storage['source']} writes {written / TERABYTE:.1f} TB of features "
            f"({storage['bytes_per_token']:,} bytes x {data.tokens:,} tokens)"
        )
    if written > free:
        out.append(
            f"the features take {written / GIB:,.1f} GiB, the disk of {storage['folder']} has {free / GIB:,.1f} GiB "
            "free: another --output, features.source online, or hybrid with features.max_gib"
        )
    if memory is not None:
        peaks = {"one process": found["memory"]["alone"]}
        peaks = found["memory"]["engines"] or peaks
        over = [name for name, facts in peaks.items() if facts["peak"] > USABLE * memory]
        if len(over) == len(peaks):
            least = min(facts["peak"] for facts in peaks.values())
            out.append(
                f"the step takes {least / GIB:.1f} GiB at least, a device has {memory / GIB:.1f} GiB: "
                "it does not fit at this training.max_tokens_per_batch"
            )
    if found["memory"]["tokens_per_batch"] < data.longest:
        out.append(f"rows have up to {data.longest:,} tokens, more than training.max_tokens_per_batch")
    return out


def _suggestions(
    recipe: Recipe, found: dict, at: Callable[[int, str | None], Memory], memory: float | None, N: int, data: Volume
) -> list[dict[str, str]]:
    """[{"key", "value", "why"}]: batch, sharding, source of the features."""
    out = []
    if memory is not None:
        room = USABLE * memory
        engine = _sharding(at, room, N, found["memory"]["tokens_per_batch"])
        if N > 1:
            out.append(engine)
        name = engine["value"].removesuffix(".yaml").rpartition("/")[2] if N > 1 else None
        out += _batch(recipe, at, room, name, data)
    out += _source(recipe, found, data)
    return out


def _sharding(at: Callable[[int, str | None], Memory], room: float, N: int, tokens: int) -> dict[str, str]:
    """The plainest engine whose step fits: each one behind shards more, and costs more communication."""
    if N == 1:
        return {"key": "accelerate configuration", "value": "", "why": "one process"}
    order = ("ddp", "fsdp2")
    chosen = next((name for name in order if at(tokens, name).peak <= room), "fsdp2")
    peak = at(tokens, chosen).peak
    held = at(tokens, chosen).held["target"]
    why = f"{peak / GIB:.1f} GiB a process"
    if peak > room:
        why += f", which is too much; {held / GIB:.1f} GiB of it are the target: shard it (target.shard), or "
        why += "features.source vllm"
    return {"key": "accelerate configuration", "value": f"recipes/accelerate/{chosen}.yaml", "why": why}


def _batch(recipe: Recipe, at, room: float, engine: str | None, data: Volume) -> list[dict[str, str]]:
    """The largest multiple of STEP_TOKENS that fits, where it is less than the recipe's, or four times as much."""
    asked = recipe.training.max_tokens_per_batch
    least = at(STEP_TOKENS, engine)
    if least.peak > room:
        parts = sorted(least.held.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in parts[:2])
        why = f"{STEP_TOKENS} tokens a batch still take {least.peak / GIB:.1f} GiB ({largest})"
        value = "a larger one, or more processes with recipes/accelerate/fsdp2.yaml and target.shard=true"
        return [{"key": "device", "value": value, "why": why}]
    low, high = 1, MOST_TOKENS // STEP_TOKENS
    while low < high:
        middle = math.ceil((low + high) / 2)
        low, high = (middle, high) if at(middle * STEP_TOKENS, engine).peak <= room else (low, middle - 1)
    best = low * STEP_TOKENS
    if best < asked:
        steps = math.ceil(asked / best) * recipe.training.gradient_accumulation_steps
        why = f"what fits; training.gradient_accumulation_steps={steps} keeps the tokens of a step"
        if best < data.longest:
            why = f"what fits, but rows have up to {data.longest:,} tokens: lower data.max_length too"
        return [{"key": "training.max_tokens_per_batch", "value": str(best), "why": why}]
    if best >= 4 * asked:
        why = f"room for {best:,} tokens a batch or more; larger ones only if the learning rate is tuned for them"
        return [{"key": "training.max_tokens_per_batch", "value": str(asked), "why": why}]
    return []


def _source(recipe: Recipe, found: dict, data: Volume) -> list[dict[str, str]]:
    """Storing spares the target's forward in all epochs but the first; what is stored has to fit."""
    storage, flops, source = found["storage"], found["flops"], recipe.features.source
    size, room = storage["bytes"] / GIB, min(storage["free"] / 2, TERABYTE)
    forward = flops["target"] + flops["statistics"]
    spared = forward * max(0, flops["trained"] - data.tokens)
    share = spared / (flops["trained"] * (forward + flops["draft"] + flops["head"]))
    fitting = min(1.0, room / max(storage["bytes"], 1))
    value, why = "online", f"storing {size:,.1f} GiB would spare {share:.0%} of the device hours"
    if source in ("store", "vllm"):
        if storage["written"] <= min(storage["free"], TERABYTE):
            return []
        why = f"{size:,.1f} GiB are much to store; without them the device hours grow by {share / (1 - share):.0%}"
    elif source != "online" or recipe.training.on_policy is not None:
        return []
    elif not spared:
        why = "in one epoch storing the features spares nothing"
    elif share * fitting >= WORTH_STORING and fitting == 1:
        value, why = "store", f"spares {share:.0%} of the device hours for {size:,.1f} GiB of disk"
    elif share * fitting >= WORTH_STORING / 2:
        value = f"hybrid with features.max_gib={room / GIB:.0f}"
        why = f"of {size:,.1f} GiB {fitting:.0%} fit, which spares {share * fitting:.0%} of the device hours"
    return [{"key": "features.source", "value": value, "why": why}]


def stated(hours: Sequence[dict[str, Any]]) -> str:
    """What device hours rest on, in words."""
    first = hours[0]
    peak = "the rate of large products measured here" if first["device"] == "cpu" else "the data sheet's bf16 peak"
    word = "assumed" if first["utilisation_assumed"] else "given"
    return f"{first['utilisation']:.0%} of {peak} ({word})"
