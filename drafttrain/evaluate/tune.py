"""`drafttrain tune`: the best K for each concurrency, predicted from a calibration pass on other prompts and checked by
an interleaved measurement.
"""

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from drafttrain.data.chat_template import Chat
from drafttrain.data.conversations import DataError
from drafttrain.data.progress import progress_bar
from drafttrain.drafts.loading import find_draft, load_draft
from drafttrain.evaluate.cost import CostModel, break_even, model_from_runs
from drafttrain.evaluate.elsewhere import counted_shape, print_rooflines, rooflines
from drafttrain.evaluate.engine_settings import SGLANG_ALGORITHMS, VLLM_METHODS, engine_settings
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.roofline import find_device, shape_of
from drafttrain.evaluate.run import gather_prompts, load_prompts, named_prompts, samplings_of
from drafttrain.evaluate.runner import NGRAM, Candidate, Prompt, configurations, evaluate
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import EvaluationConfig, Recipe
from drafttrain.specdec.clock import Clock
from drafttrain.specdec.graphs import CAPTURED, StaticSteps, capture_note
from drafttrain.target import Target

Bar = Callable[[str, int], AbstractContextManager[Callable[[int, str], None] | None]]
REPEATS = 9


def calibrated_ks(ks: Sequence[int]) -> list[int]:
    """The K that the calibration pass runs: the smallest, the deepest, and the one nearest their geometric mean."""
    low, high = min(ks), max(ks)
    return sorted({low, min(sorted(ks), key=lambda k: abs(math.log(k * k / (low * high)))), high})


def time_widths(
    target: Target, prompts: Sequence[Sequence[int]], widths: Sequence[int], repeats: int = REPEATS
) -> dict[int, float]:
    """{n: median seconds} of the target's bare forward over n tokens behind each of the prompts (one batch, token ids).

    The widths are interleaved, in an order shuffled anew for every repeat, because machines drift. Nothing is
    committed, so each forward meets the same cache.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    room = int(lengths.max()) + max(widths)
    # As the loop itself does: captured where the target allows it.
    static = StaticSteps.of(target, len(prompts)) if capture_note(target) == CAPTURED else None
    cache = RaggedCache(len(prompts), capacity=room) if static is None else static.begin(room)
    step = target.step if static is None else static.step
    spent: dict[int, list[float]] = {n: [] for n in widths}
    rng = random.Random(0)
    with torch.no_grad():
        target.step(tokens, cache, lengths, last_only=True)
        cache.lengths = lengths
        for repeat in range(repeats + 1):
            for n in rng.sample(sorted(widths), len(widths)):
                clock = Clock(target.device)
                step(tokens[:, :1].expand(-1, n), cache)
                clock.mark("step")
                ((_, seconds),) = clock.read()
                if repeat:  # The first round warms up.
                    spent[n].append(seconds)
    return {n: statistics.median(times) for n, times in spent.items()}


def widths_of(candidates: Sequence[Candidate], ks: Sequence[int]) -> list[int]:
    """Tokens of a forward to time: all that chains verify, and every half power of two up to the largest tree."""
    chains = [1 + max(candidate.ks or ks) for candidate in candidates if candidate.tree is None]
    nodes = max((candidate.tree.nodes for candidate in candidates if candidate.tree is not None), default=0)
    steps = {round(2 ** (power / 2)) for power in range(2 * math.ceil(math.log2(nodes + 1)))} if nodes else set()
    return sorted({*range(1, max(chains, default=1) + 1), *steps, nodes + 1})


def calibrate(
    target: Target,
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    *,
    ks: Sequence[int],
    samplings: Sequence[Sampling],
    concurrency: Sequence[int],
    max_new_tokens: int,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[dict[tuple, CostModel], dict[tuple, float]]:
    """({(label, sampling, concurrency): model}, {(sampling, concurrency): decoded tokens of a request}).

    Keys are those of `_key`. One pass over the prompts at `calibrated_ks`, then bare forwards at each concurrency, half
    of the new tokens behind the prompts.
    """
    few = _with_few_ks(candidates, ks)
    report = evaluate(
        target,
        few,
        prompts,
        k=calibrated_ks(ks),
        samplings=samplings,
        concurrency=concurrency,
        max_new_tokens=max_new_tokens,
        ngram=False,
        certificate=False,
        name="calibration",
        progress=progress,
    )
    if report["interrupted"]:
        raise KeyboardInterrupt
    if not all(run["rounds"] for run in report["runs"]):
        raise EvaluationError(
            "every calibration text ended with its first token, so nothing was timed; expected some that go on. Mend: "
            "give other prompts (--calibration)"
        )
    groups: dict[tuple, list[dict]] = {}
    for run in report["runs"]:
        groups.setdefault(_key(run), []).append(run)
    plain = {key[1:]: runs[0] for key, runs in groups.items() if not key[0]}
    seconds = {rows: _time_batch(target, prompts, rows, few, ks, max_new_tokens) for rows in concurrency}
    models = {
        key: model_from_runs(runs, plain[key[1:]], seconds[key[2]], math.ceil(len(prompts) / key[2]))
        for key, runs in groups.items()
        if key[0]
    }
    return models, {key: run["emitted_tokens"] / len(prompts) - 1 for key, run in plain.items()}


def _with_few_ks(candidates: Sequence[Candidate], ks: Sequence[int]) -> list[Candidate]:
    return [replace(candidate, ks=tuple(calibrated_ks(candidate.ks or ks))) for candidate in candidates]


def _time_batch(
    target: Target, prompts: Sequence[Prompt], rows: int, candidates: Sequence[Candidate], ks, max_new_tokens: int
) -> dict[int, float]:
    """Bare forwards behind the `rows` prompts around the median length, each continued by half of the new tokens."""
    ordered = sorted((prompt.ids for prompt in prompts), key=len)
    start = max(0, (len(ordered) - rows) // 2)
    chosen = [ordered[min(start + row, len(ordered) - 1)] for row in range(rows)]
    more, widths = max_new_tokens // 2, widths_of(candidates, ks)
    room = target.max_positions - max(widths)
    longer = [(list(ids) * (1 + more // len(ids) + 1))[: min(len(ids) + more, room)] for ids in chosen]
    return time_widths(target, longer, widths)


def _key(run: Mapping[str, Any]) -> tuple[str, str, int]:
    """(label without K, "" for plain; sampling; concurrency) of a report's run."""
    label = "" if run["draft"] == "none" else run["label"].removesuffix(f" k={run['k']}")
    return label, json.dumps([run["mode"], run["sampling"]], sort_keys=True), run["concurrency"]


def tune(
    target: Target,
    candidates: Sequence[Candidate],
    calibration: Sequence[Prompt],
    test: Sequence[Prompt],
    *,
    ks: Sequence[int] = (1, 2, 3, 4, 5, 7),
    samplings: Sequence[Sampling] = (Sampling(),),
    concurrency: Sequence[int] = (1,),
    max_new_tokens: int = 128,
    certificate: bool = True,
    name: str = "prompts",
    training_rows: Sequence[Sequence[int]] = (),
    recipe: Mapping[str, Any] | None = None,
    bar: Bar | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The report of `evaluate` on the test prompts at every K, with "predicted": {"speedup", "tau", "error"} in each
    run (error = predicted / measured - 1), and "tune":

    {"median_error", "calibration": {"prompts", "k"}, "best": {concurrency: {label: {"k", "predicted", "measured",
    "measured_k", "measured_best"}}} (k 0: plain decoding is predicted to be best), "break_even": [{"label",
    "predicted", "measured"}], "costs": {concurrency: {label: {"c", "round", "v": [v(0), v(1), ..], "o"}}}, "settings":
    {label: engine settings for the measured best K}}; best, costs and settings for the first sampling. bar: makes the
    progress of a stage. Raises EvaluationError for no calibration prompts or one that is also measured, where every
    calibration text ends at once, and what evaluate does.
    """
    both = {prompt.ids for prompt in calibration} & {prompt.ids for prompt in test}
    if not calibration or both:
        raise EvaluationError(
            f"{len(calibration)} calibration prompts, {len(both)} of them also measured; expected at least one, and "
            "none that is also measured: a prediction must not have seen what it predicts. Mend: give other prompts"
        )
    bar = bar or (lambda description, total: nullcontext())
    options = {"samplings": samplings, "concurrency": concurrency, "max_new_tokens": max_new_tokens}
    few = calibrated_ks(ks)
    say(f"calibration: {len(calibration)} prompts, K = {', '.join(map(str, few))}")
    with bar("calibrating", _batches(calibration, _with_few_ks(candidates, ks), ks, samplings, concurrency)) as update:
        models, tokens = calibrate(target, candidates, calibration, ks=ks, progress=update, **options)
    say(f"measuring: {len(test)} other prompts, K = {', '.join(map(str, sorted(ks)))}, interleaved")
    options |= {"ngram": False, "certificate": certificate, "name": name}
    options |= {"training_rows": training_rows, "recipe": recipe}
    with bar("measuring", _batches(test, candidates, ks, samplings, concurrency)) as update:
        report = evaluate(target, candidates, test, k=ks, progress=update, **options)
    for run in report["runs"]:
        if run["draft"] != "none":
            run["predicted"] = _prediction(models[_key(run)], tokens[_key(run)[1:]], run)
    first = _key(report["runs"][0])[1]
    report["tune"] = _findings(report["runs"], models, tokens, candidates, first)
    report["tune"]["calibration"] = {"prompts": len(calibration), "k": few}
    return report


def _batches(prompts, candidates, ks, samplings, concurrency) -> int:
    """How many batches `evaluate` decodes."""
    groups = sum(math.ceil(len(prompts) / rows) for rows in set(concurrency))
    return groups * len(configurations(candidates, ks, samplings))


def _prediction(model: CostModel, tokens: float, run: Mapping[str, Any]) -> dict[str, float | None]:
    found, measured = model.predict(run["k"], tokens), run["speedup"]
    error = found["speedup"] / measured - 1 if measured else None
    return {"speedup": found["speedup"], "tau": found["tau"], "error": error}


def _findings(runs, models, tokens, candidates: Sequence[Candidate], sampling: str) -> dict[str, Any]:
    """The summary over the measured runs; `sampling` is the one that best K, costs and settings are for."""
    best: dict[str, dict] = {}
    costs: dict[str, dict] = {}
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    for key in dict.fromkeys(_key(run) for run in runs if _key(run)[0] and _key(run)[1] == sampling):
        label, _, rows = key
        measured = {run["k"]: run["speedup"] for run in runs if _key(run) == key and run["speedup"] is not None}
        if not measured:
            continue
        found = models[key].best(list(measured), tokens[key[1:]])
        top = max(measured, key=measured.get)
        curves.setdefault(label, {})[rows] = (found["speedup"], measured[top])
        pays, really = found["speedup"] > 1, measured[top] > 1
        best.setdefault(str(rows), {})[label] = {
            "k": found["k"] if pays else 0,
            "predicted": found["speedup"] if pays else 1.0,
            "measured": measured[found["k"]] if pays else 1.0,
            "measured_k": top if really else 0,
            "measured_best": measured[top] if really else 1.0,
        }
        deepest = models[key].predict(max(measured))
        v = [models[key].verify_at(k) for k in range(max(measured) + 1)]
        fixed, each = models[key].draft
        line = {"c": each, "round": fixed} if fixed > 0 and each > 0 else {"c": deepest["c"], "round": 0.0}
        costs.setdefault(str(rows), {})[label] = {**line, "v": v, "o": deepest["o"]}
    errors = [run["predicted"]["error"] for run in runs if "predicted" in run and run["predicted"]["error"] is not None]
    return {
        "median_error": statistics.median(map(abs, errors)) if errors else None,
        "best": best,
        "break_even": [
            {
                "label": label,
                "predicted": break_even({rows: pair[0] for rows, pair in curve.items()}),
                "measured": break_even({rows: pair[1] for rows, pair in curve.items()}),
            }
            for label, curve in curves.items()
        ],
        "costs": costs,
        "settings": _settings(best, candidates),
    }


def _settings(best: Mapping[str, Mapping[str, Any]], candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Engine settings for each chain that an engine serves, at the K that measured best."""
    settings = {}
    for candidate in candidates:
        served = candidate.kind in VLLM_METHODS or candidate.kind in SGLANG_ALGORITHMS
        table = {int(rows): row[candidate.label]["measured_k"] for rows, row in best.items() if candidate.label in row}
        named = candidate.checkpoint is not None or candidate.kind == "ngram"
        if served and named and table and candidate.tree is None:
            settings[candidate.label] = engine_settings(candidate.kind, candidate.checkpoint, table)
    return settings


def print_tune(report: Mapping[str, Any], console: Console) -> None:
    """A table of predicted against measured for each sampling and concurrency, then errors, break-even and best K."""
    groups: dict[tuple, list] = {}
    for run in report["runs"]:
        if "predicted" in run:
            groups.setdefault(_key(run)[1:], []).append(run)
    for (_, rows), runs in groups.items():
        mode = f"{runs[0]['mode']}, T = {runs[0]['sampling']['temperature']:g}"
        table = Table(title=f"{mode}, concurrency {rows}", title_justify="left", title_style="bold", box=None)
        table.header_style = "dim"
        for name in ("run", "predicted", "measured", "error", "tau predicted", "measured"):
            table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
        top = max(runs, key=lambda run: run["speedup"] or 0.0)
        for run in runs:
            found = run["predicted"]
            cells = [f"{found['speedup']:.2f}x", _number(run["speedup"], "{:.2f}x"), _number(found["error"], "{:+.1%}")]
            taus = [f"{found['tau']:.2f}", f"{run['mean_acceptance_length']:.2f}"]
            table.add_row(run["label"].replace("[", r"\["), *cells, *taus, style="bold" if run is top else None)
        console.print(table)
        console.print()
    tuned = report["tune"]
    lines = [f"median error of the prediction: {_number(tuned['median_error'], '{:.1%}')}"]
    for rows, row in tuned["best"].items():
        for label, found in row.items():
            lines.append(
                f"concurrency {rows}, {label}: best K predicted {found['k']} ({found['predicted']:.2f}x), "
                f"measured {found['measured_k']} ({found['measured_best']:.2f}x)"
            )
    if "break_even" in report:
        for found in tuned["break_even"]:
            lines.append(
                f"{found['label']}: break-even concurrency predicted {_number(found['predicted'], '{:.0f}')}, "
                f"measured {_number(found['measured'], '{:.0f}')}"
            )
    for line in lines:
        console.print(line, markup=False, highlight=False)
    print_rooflines(tuned.get("roofline", ()), console)


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else form.format(value)


def tuning_prompts(
    target: Target,
    settings: EvaluationConfig,
    calibration: str | Path | None = None,
    recipe: Recipe | None = None,
    say: Callable[[str], None] = print,
) -> tuple[list[Prompt], list[Prompt], str]:
    """(calibration prompts, prompts to measure, name), none in both. Measured: evaluation.prompts, the recipe's
    data.test or the built-in set. Calibration: the given file or set, or data.validation; without either, or where
    that holds no prompts, every second of the prompts to measure.
    """
    chat, count = Chat.of(recipe), settings.num_prompts
    other: list[Prompt] = []
    if calibration is not None:
        other = named_prompts(str(calibration), target, chat, count, settings.seed, settings.max_new_tokens, say)
    elif recipe and recipe.data.validation and not settings.prompts:
        try:
            other = load_prompts(recipe.data.validation, target, chat, count, settings.seed, say)
        except DataError as error:
            say(f"data.validation holds no prompts ({error}); calibrating on every second test prompt")
    alone = not other
    asked = settings.model_copy(update={"num_prompts": 2 * count}) if alone else settings
    name, test = gather_prompts(asked, recipe, target, say)
    first, test = _halves(test) if alone else (other, test)
    measured = {prompt.ids for prompt in test}
    return [prompt for prompt in first if prompt.ids not in measured], test, name


def _halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """(calibration, measured): every second unit of each category; the turns of a conversation stay together."""
    seen: dict[str | None, list[str | int]] = {}
    halves: tuple[list[Prompt], list[Prompt]] = ([], [])
    for index, prompt in enumerate(prompts):
        units = seen.setdefault(prompt.category, [])
        unit = prompt.unit or index
        if unit not in units:
            units.append(unit)
        halves[1 - units.index(unit) % 2].append(prompt)
    return halves


def tune_draft(
    source: str | Path,
    target: Target,
    settings: EvaluationConfig,
    *,
    concurrency: Sequence[int] = (1,),
    calibration: str | Path | None = None,
    recipe: Recipe | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    devices: Sequence[str] = (),
    context: float = 1024,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`tune` for a draft folder, run or hub id, and for n-gram lookup, on the prompts of `tuning_prompts`.

    devices: adds what a roofline predicts for them with the measured acceptance, at `context` cached tokens.

    Raises EvaluationError when there are too few prompts, DraftError when the draft does not fit the target.
    """
    for device in devices:  # What a roofline has no numbers for is told before anything is measured.
        find_device(device)
        shape_of(target.config)
    first, test, name = tuning_prompts(target, settings, calibration, recipe, say)
    draft = load_draft(source, target)
    candidates = [NGRAM] if settings.ngram else []
    checkpoint = str(find_draft(source))  # What an engine can load: of a run its draft folder.
    candidates.append(Candidate(draft.method, draft.method, lambda: draft.proposer(target), True, checkpoint))
    report = tune(
        target,
        candidates,
        first,
        test,
        ks=settings.k,
        samplings=samplings_of(settings),
        concurrency=concurrency,
        max_new_tokens=settings.max_new_tokens,
        name=name,
        training_rows=training_rows,
        recipe=recipe.model_dump(mode="json") if recipe else None,
        bar=progress_bar,
        say=say,
    )
    shapes = {draft.method: counted_shape(draft), **({"ngram": None} if settings.ngram else {})}
    report["tune"]["roofline"] = rooflines(report, target, shapes, devices, context)
    return report
