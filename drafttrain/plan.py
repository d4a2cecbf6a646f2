"""`drafttrain plan`: which size of small draft pays on a device, at an acceptance that is assumed.

S = tau / (v(K) + K c + o): c, v and o are measured in the evaluator's own loop, or follow from a roofline; tau from the
assumed acceptance. Cost decides more than quality does: a wide shallow draft can beat a larger, better one (arXiv
2402.01528).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from drafttrain.drafts.base import Draft
from drafttrain.drafts.small_model import SmallModelProposer
from drafttrain.evaluate.cost import CostModel, joint_from_conditional
from drafttrain.evaluate.roofline import Roofline, find_device, layer_seconds_on, shape_of
from drafttrain.evaluate.sizes import DraftCost, Update, measure_drafts
from drafttrain.plan_candidates import (
    PlanError,
    Size,
    Weights,
    build_models,
    check_size,
    student_config,
    weights_from,
    weights_of,
)
from drafttrain.target import Target

KS = (1, 2, 3, 4, 5)
ACCEPTANCE = 0.6

Rates = float | Sequence[float]
Acceptance = Rates | Mapping[str, Rates]
"""A number: each draft's acceptance given the one before it; numbers: joint rates per position; or either for each
size by name, "" for the sizes not named."""


def rates_of(acceptance: Acceptance, label: str, deepest: int) -> list[float]:
    """Joint rates of positions 1 to `deepest`, or fewer where the given ones end. PlanError where that is none."""
    if isinstance(acceptance, Mapping):
        if label not in acceptance and "" not in acceptance:
            raise PlanError(f"no acceptance is given for {label}. Mend: give one for it, or one for all the rest")
        return rates_of(acceptance.get(label, acceptance.get("")), label, deepest)
    if isinstance(acceptance, int | float):
        joint = joint_from_conditional([acceptance] * deepest)
    else:
        joint = list(acceptance)[:deepest]
    falling = all(high >= low for high, low in zip([1.0, *joint], joint, strict=False))
    if not joint or not falling or joint[-1] < 0:
        raise PlanError(
            f"the acceptance of {label} is {acceptance}; expected a number within 0 to 1, or joint rates per position "
            "within 0 to 1 that never rise, e.g. 0.7,0.5,0.35"
        )
    return joint


def plan_sizes(
    target: Target,
    candidates: Sequence[Size],
    acceptance: Acceptance = ACCEPTANCE,
    ks: Sequence[int] = KS,
    *,
    draft_vocab: int | None = None,
    context: int = 128,
    concurrency: int = 1,
    rounds: int = 5,
    repeats: int = 3,
    progress: Update | None = None,
) -> dict[str, Any]:
    """What each size costs here, and the best speedup it is predicted to reach; json-able, the sizes best first.

    {"target", "device", "measured", "k", "context", "concurrency", "draft_vocab", "plain_step" [s], "plain_range",
    "head": {"parameters", "share_of_bytes", "share_of_step"}, "sizes", "best": label | None, "reason": str | None}.
    Of each size: {"label", "kind", "layers", "hidden_size", "draft": keys of a recipe, counts of `Weights.facts`,
    "acceptance": joint rates, "acceptance_assumed": True, "c", "c_range", "v": [v(0), v(1), ..], "o", "predictions":
    [{"k", "tau", "speedup", "c", "v", "o"}], "best": one of them, "break_even_acceptance", "acceptance_to_tie"}.
    The last two are conditional rates at which S is 1, and that of the best other size; None: not even at 1.

    draft_vocab: head rows of the drafts, None for all words. Raises PlanError for sizes, acceptance or K that make no
    sense, EvaluationError where positions do not suffice.
    """
    rates = _checked(candidates, target.config, acceptance, ks)
    rows = _head_rows(draft_vocab, target.vocab_size)
    ids = None if rows is None else torch.arange(rows)
    models = build_models(candidates, target)
    weights = {label: weights_of(SmallModelProposer(model, ids).model, concurrency) for label, model in models.items()}
    makes = {label: partial(SmallModelProposer, model, ids) for label, model in models.items()}
    options = {"context": context, "concurrency": concurrency, "rounds": rounds, "repeats": repeats}
    costs = measure_drafts(target, makes, rates, progress=progress, **options)
    entries = []
    for size in candidates:
        cost = costs.drafts[str(size)]
        entries.append(_entry(size, weights[str(size)], target.config, rates, ks, cost.model, cost.c))
    whole = weights_of(target, concurrency)
    cuda = target.device.type == "cuda"
    facts = {
        "target": _target_facts(target.title, target.config, whole),
        "device": torch.cuda.get_device_name(target.device) if cuda else f"CPU, {torch.get_num_threads()} threads",
        "measured": True,
        "plain_step": costs.step,
        "plain_range": [min(costs.plain), max(costs.plain)],
        "head": _head_facts(whole, costs.head / costs.step),
    }
    return _plan(facts, entries, ks, context, concurrency, rows)


def plan_device(
    config: PretrainedConfig,
    candidates: Sequence[Size],
    device: str,
    acceptance: Acceptance = ACCEPTANCE,
    ks: Sequence[int] = KS,
    *,
    name: str = "target",
    draft_vocab: int | None = None,
    context: int = 1024,
    concurrency: int = 1,
    layer_seconds: float | None = None,
) -> dict[str, Any]:
    """As `plan_sizes`, from the target's config and a device's roofline alone (bf16): nothing is loaded or measured.

    layer_seconds: added for each layer of a forward, of target and draft alike; None: what `layer_seconds_on` assumes.
    RooflineError for an unknown device or a model type that is not counted.
    """
    rates = _checked(candidates, config, acceptance, ks)
    rows = _head_rows(draft_vocab, config.vocab_size)
    found = find_device(device)
    layer_seconds = layer_seconds_on(found) if layer_seconds is None else layer_seconds
    roofline = Roofline(found, layer_overhead=layer_seconds)
    entries = []
    for size in candidates:
        small = student_config(size, config)
        shape = shape_of(small, rows)
        model = roofline.model(config, shape, rates[str(size)], concurrency, context)
        weights = weights_from(small, rows, tokens=concurrency)
        entries.append(_entry(size, weights, config, rates, ks, model))
    whole = weights_from(config, tokens=concurrency)
    step = roofline.seconds(shape_of(config), 1, concurrency, context)
    facts = {
        "target": _target_facts(name, config, whole),
        "device": roofline.device.name,
        "measured": False,
        "plain_step": step,
        "plain_range": [step, step],
        "head": _head_facts(whole, whole.head * whole.itemsize / roofline.device.bandwidth / step),
        "layer_seconds": layer_seconds,
    }
    return _plan(facts, entries, ks, context, concurrency, rows)


def _checked(candidates: Sequence[Size], config, acceptance: Acceptance, ks: Sequence[int]) -> dict[str, list[float]]:
    """{label: joint rates}, once sizes, K and acceptance make sense."""
    if not candidates or not ks or min(ks) < 1:
        raise PlanError(f"{len(candidates)} sizes at K = {list(ks)}; expected at least one of both, and K from 1 on")
    for size in candidates:
        check_size(size, config)
    labels = [str(size) for size in candidates]
    unknown = set(acceptance) - {*labels, ""} if isinstance(acceptance, Mapping) else set()
    if unknown:
        raise PlanError(f"acceptance is given for {', '.join(sorted(unknown))}; the sizes are {', '.join(labels)}")
    rates = {label: rates_of(acceptance, label, max(ks)) for label in labels}
    short = [label for label, joint in rates.items() if len(joint) < min(ks)]
    if short:
        raise PlanError(
            f"{short[0]} has acceptance rates for {len(rates[short[0]])} positions, K starts at {min(ks)}. Mend: rates "
            "for more positions, or a smaller K"
        )
    return rates


def _head_rows(draft_vocab: int | None, vocab_size: int) -> int | None:
    if draft_vocab is not None and draft_vocab < 1:
        raise PlanError(f"the draft vocabulary is {draft_vocab}; expected at least one word")
    return None if draft_vocab is None or draft_vocab >= vocab_size else draft_vocab


def _target_facts(name: str, config: PretrainedConfig, weights: Weights) -> dict[str, Any]:
    shape = {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    return {"name": name, **shape, **weights.facts()}


def _head_facts(weights: Weights, share_of_step: float) -> dict[str, Any]:
    share = weights.head / weights.read
    return {"parameters": weights.head, "share_of_bytes": share, "share_of_step": share_of_step}


def _entry(size: Size, weights: Weights, config, rates, ks, model: CostModel, c: Sequence[float] = ()) -> dict:
    joint = rates[str(size)]
    allowed = sorted(k for k in set(ks) if k <= len(joint))
    best = model.best(allowed)
    return {
        "label": str(size),
        "kind": size.kind,
        "layers": size.layers,
        "hidden_size": size.hidden_size or config.hidden_size,
        "draft": size.settings(),
        **weights.facts(),
        "acceptance": joint,
        "acceptance_assumed": True,
        "c": best["c"],
        "c_range": [min(c), max(c)] if c else None,
        "v": [model.verify_at(k) for k in range(len(joint) + 1)],
        "o": best["o"],
        "predictions": [model.predict(k) for k in allowed],
        "best": best,
        "break_even_acceptance": acceptance_for(1.0, model, allowed),
        "_model": model,
    }


def acceptance_for(speedup: float, model: CostModel, ks: Sequence[int]) -> float | None:
    """The smallest conditional acceptance, the same at every position, at which some K reaches this speedup; None
    where not even 1 does.
    """

    def reached(acceptance: float) -> float:
        joint = joint_from_conditional([acceptance] * max(ks))
        return replace(model, acceptance={max(ks): joint}).best(ks)["speedup"]

    low, high = 0.0, 1.0
    if reached(high) < speedup:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) >= speedup else (middle, high)
    return high


def _plan(facts: dict[str, Any], entries: list[dict], ks, context: int, concurrency: int, rows: int | None) -> dict:
    # Of sizes that cost the same, the larger one will be accepted more often.
    entries.sort(key=lambda entry: (-round(entry["best"]["speedup"], 3), -entry["body"]))
    for i, entry in enumerate(entries):
        model, others = entry.pop("_model"), [other for j, other in enumerate(entries) if j != i]
        goal = max((other["best"]["speedup"] for other in others), default=None)
        allowed = [found["k"] for found in entry["predictions"]]
        entry["acceptance_to_tie"] = None if goal is None else acceptance_for(goal, model, allowed)
    settings = {"k": sorted(set(ks)), "context": context, "concurrency": concurrency, "draft_vocab": rows}
    plan = {**facts, **settings, "sizes": entries}
    pays = entries[0]["best"]["speedup"] > 1
    return {**plan, "best": entries[0]["label"] if pays else None, "reason": None if pays else _reason(plan)}


def _reason(plan: Mapping[str, Any]) -> str:
    """Why no size pays, in a few sentences of figures."""
    top, head, target = plan["sizes"][0], plan["head"], plan["target"]
    best, k = top["best"], top["best"]["k"]
    cost = f"{best['v'] - 1:+.2f} to verify, {k * best['c']:.2f} to draft, {best['o']:.2f} for the rest"
    parts = [
        f"no size pays at this acceptance: the best, {top['label']}, is predicted at {best['speedup']:.2f}x. With K = "
        f"{k} a round gains {best['tau'] - 1:.2f} tokens and costs {best['v'] + k * best['c'] + best['o'] - 1:.2f} "
        f"plain steps more ({cost})"
    ]
    if head["share_of_bytes"] >= 0.25 and plan["draft_vocab"] is None:
        how = "measured" if plan["measured"] else "by its bytes"
        wide = [entry["c"] for entry in plan["sizes"] if entry["hidden_size"] == target["hidden_size"]]
        each = f": every full-width student drafts at c = {min(wide):.2f} or more" if wide else ""
        parts.append(
            f"the head over {target['vocab_size']:,} words alone takes {head['share_of_step']:.2f} of a plain step "
            f"({how}; {head['share_of_bytes']:.0%} of the weights a step reads){each}"
        )
    needs = [(entry["break_even_acceptance"], entry["label"]) for entry in plan["sizes"]]
    needs = [pair for pair in needs if pair[0] is not None]
    if needs:
        parts.append(f"the least that would pay is an acceptance of {min(needs)[0]:.2f}, by {min(needs)[1]}")
    else:
        parts.append("none would pay even if every draft were accepted")
    return "; ".join(parts)


def predict_student(
    target: Target,
    draft: Draft | Target,
    per_position: Sequence[float] | Mapping[int, Sequence[float]],
    k: int | Sequence[int],
    *,
    tokens: float | None = None,
    context: int = 128,
    concurrency: int = 1,
    rounds: int = 8,
    repeats: int = 5,
    progress: Update | None = None,
) -> dict[str, Any]:
    """The speedup of a draft at hand from its own c, v and o, measured here, and measured acceptance.

    draft: any Draft, or a small model (`load_target`). per_position: joint rates, or those of each K: they depend on
    it. tokens: decoded tokens of a request, so that its prompt and its last round count; None: the steady state.
    Returns {"plain_step", "plain_range", "c_range", "predictions": [{"k", "tau", "speedup", "c", "v", "o"}]}. Raises
    PlanError for rates that make no sense.
    """
    ks = sorted({k} if isinstance(k, int) else set(k))
    given = per_position if isinstance(per_position, Mapping) else dict.fromkeys(ks, per_position)
    if not ks or ks[0] < 1 or any(len(given.get(one, ())) < one for one in ks):
        found = "; ".join(f"{len(given.get(one, ()))} acceptance rates for K = {one}" for one in ks) or "no K"
        raise PlanError(f"found {found}; expected K from 1 on, and a rate for each position of each K")
    rates = {one: rates_of(tuple(given[one]), f"K = {one}", one) for one in ks}
    make = partial(SmallModelProposer, draft) if isinstance(draft, Target) else partial(draft.proposer, target)
    options = {"context": context, "concurrency": concurrency, "rounds": rounds, "repeats": repeats}
    costs = measure_drafts(target, {"draft": make}, {"draft": rates[ks[-1]]}, progress=progress, **options)
    found: DraftCost = costs.drafts["draft"]
    return {
        "plain_step": costs.step,
        "plain_range": [min(costs.plain), max(costs.plain)],
        "c_range": [min(found.c), max(found.c)],
        "predictions": [replace(found.model, acceptance={one: rates[one]}).predict(one, tokens) for one in ks],
    }


def measured_runs(report: Mapping[str, Any], method: str, source: str | Path, concurrency: int = 1) -> dict[int, Any]:
    """{K: run} of a report: the chains of a draft of this method at one concurrency, greedy before sampled, those of
    this very checkpoint where the report names it. PlanError where there are none.
    """
    runs = [
        run
        for run in report.get("runs", ())
        if run["draft"] == method and run["trained"] and run["concurrency"] == concurrency and run["speedup"]
        if not (run["tree"] or run["policy"] or run["lossy"] or run.get("quantization"))
    ]
    folder = Path(source).resolve()
    own = [run for run in runs if run["checkpoint"] and Path(run["checkpoint"]).resolve() in (folder, folder / "draft")]
    chosen = own or runs
    if not chosen:
        labels = ", ".join(run["label"] for run in report.get("runs", ())) or "nothing"
        raise PlanError(
            f"the report has no chain of a trained {method} draft at concurrency {concurrency}; it has {labels}. Mend: "
            "the report.json that drafttrain evaluate wrote for this draft"
        )
    first = min(chosen, key=lambda run: run["mode"] != "greedy")
    same = [run for run in chosen if (run["mode"], run["sampling"]) == (first["mode"], first["sampling"])]
    return {run["k"]: run for run in sorted(same, key=lambda run: run["k"])}


def predict_report(
    target: Target, draft: Draft, report: Mapping[str, Any], source: str | Path, concurrency: int = 1, **options: Any
) -> dict[str, Any]:
    """`predict_student` at the acceptance of a report's runs, beside their measured speedup: each prediction gains
    "measured" and "error" (predicted / measured - 1); "median_error" is over their absolute values.
    """
    runs = measured_runs(report, draft.method, source, concurrency)
    run = next(iter(runs.values()))
    plain = next(other for other in report["runs"] if other["id"] == run["baseline"])
    tokens = plain["emitted_tokens"] / plain["prompts"] - 1
    rates = {k: _padded(run["per_position_acceptance"], k) for k, run in runs.items()}
    found = predict_student(target, draft, rates, list(runs), tokens=tokens, concurrency=concurrency, **options)
    for prediction in found["predictions"]:
        measured = runs[prediction["k"]]["speedup"]
        prediction |= {"measured": measured, "error": prediction["speedup"] / measured - 1}
    errors = [abs(prediction["error"]) for prediction in found["predictions"]]
    return {**found, "label": run["label"].removesuffix(f" k={run['k']}"), "median_error": statistics.median(errors)}


def _padded(rates: Sequence[float], k: int) -> list[float]:
    """A draft that never went so deep has rate 0 there."""
    return [*rates, *[0.0] * (k - len(rates))]
