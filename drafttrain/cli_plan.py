"""The verb `plan`: nothing but argument handling; cli.py registers it.

A recipe gets what its training costs; a target or a kd recipe, and whoever gives options of sizes, the sizes of small
drafts.
"""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, OptionError, console_for, say_for

Source = Annotated[
    str, typer.Argument(help="A recipe, a run folder, or a target: folder, hub id, .gguf.", metavar="TARGET|RECIPE")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Of a recipe: dotted overrides, e.g. training.ttt_steps=3.", metavar="KEY=VALUE"),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        help="Sizes to plan, e.g. pruned:6,fresh:128x4. Default: a range of them, for a target or a kd recipe; for "
        "other recipes, and with none, the cost alone."
    ),
]
Accepted = Annotated[
    list[str] | None,
    typer.Option(
        "--acceptance",
        help="Assumed: .6 (each draft given the one before), .7,.5,.35 (joint, per position), or fresh:128x4=.5 for "
        "one size. May be given several times. Default: .6.",
    ),
]
Ks = Annotated[str | None, typer.Option("--k", help="Drafts a round, e.g. 1,3,5.")]
Devices = Annotated[
    str | None,
    typer.Option("--device", help="Plan for devices that are not here: A100, H100, H200, B200, L40S, 4090, cpu."),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(plan)


def plan(
    source: Source,
    overrides: Overrides = None,
    sizes: Sizes = None,
    acceptance: Accepted = None,
    k: Ks = None,
    device: Devices = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Head rows of the drafts. Default: a kd recipe's data.draft_vocab, else all.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 1,
    context: Annotated[
        int | None,
        typer.Option(help="Cached tokens of a request. Default: 128 measured, 1024 for --device.", min=1),
    ] = None,
    layer_time: Annotated[
        float | None,
        typer.Option(help="With --device: microseconds a layer takes at least. Default: 30 on GPUs.", min=0),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="A trained draft to predict: run, folder or hub id.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="report.json of that draft: its acceptance, and what to compare with.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Cost: tokens of training data, in place of counting.")] = None,
    processes: Annotated[int | None, typer.Option(help="Cost: processes, one a device. Default: 1.", min=1)] = None,
    utilisation: Annotated[
        float | None, typer.Option(help="Cost: share of the device's peak that is reached. Default: .35, CPUs .5.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Cost: the run's folder, whose disk must have room.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what training a recipe costs: parameters, memory of a process, storage, FLOPs, device hours, published
    acceptance, what does not fit. For a kd recipe or a target, name the size of small draft with the best predicted
    speedup too: costs measured here, or from a device's roofline, acceptance assumed. With --draft: predict a trained
    one.

    Example: drafttrain plan recipes/qwen3/eagle3-qwen3-8b.yaml --device H100 --processes 8
    """
    from drafttrain.recipe import TargetConfig

    recipe, settings = _open(source, overrides)
    ks = _numbers(k, int, "--k")
    given = _acceptance(acceptance)
    of_cost = {"--tokens": tokens, "--processes": processes, "--utilisation": utilisation, "--output": output}
    if draft is not None or report is not None:
        refused = {"--sizes": sizes, "--device": device, "--draft-vocab": draft_vocab, **of_cost}
        _student(source, settings, recipe, draft, report, given, ks, refused, concurrency, context or 128, as_json)
        return
    cost = _cost(recipe, device, tokens, processes, utilisation, output) if recipe is not None else None
    wrong = [flag for flag, value in of_cost.items() if value is not None and cost is None]
    if wrong:
        raise OptionError(f"{', '.join(wrong)} given for a target alone; expected a recipe, which says what is trained")
    if not _asks_for_sizes(recipe, sizes, given, ks):
        _show([], cost, None, None, as_json)
        return
    if recipe is not None and recipe.method == "kd" and draft_vocab is None:
        draft_vocab = recipe.data.draft_vocab
    options = {"draft_vocab": draft_vocab, "concurrency": concurrency, **({"ks": ks} if ks else {})}
    options |= {"acceptance": given} if given else {}
    assert isinstance(settings, TargetConfig)
    if device is not None:
        plans = _devices(settings, sizes, device, options, context or 1024, layer_time)
    else:
        plans = [_measured(settings, sizes, options, context or 128, say_for(as_json))]
    _show(plans, cost, _train_arguments(source, recipe), reset_keys(recipe) if recipe else None, as_json)


def _asks_for_sizes(recipe, sizes: str | None, given: dict | None, ks: list[int] | None) -> bool:
    """Whether sizes of small drafts are planned: not with `--sizes none`; for a recipe of another method only where an
    option of theirs is given.
    """
    if sizes == "none":
        return False
    return recipe is None or recipe.method == "kd" or any(value is not None for value in (sizes, given, ks))


def _cost(recipe, device, tokens, processes, utilisation, output) -> dict:
    from drafttrain.plan_cost import plan_cost

    options = {"tokens": tokens, "processes": processes or 1, "utilisation": utilisation, "output": output}
    return plan_cost(recipe, device=device, **options)


def _open(source: str, overrides: list[str] | None = None):
    """(recipe or None, settings of the target)."""
    from drafttrain.data.run_folder import RunFolder
    from drafttrain.recipe import TargetConfig, load_recipe

    path = Path(source)
    run = RunFolder(path)
    if path.suffix in (".yaml", ".yml"):
        recipe = load_recipe(path, overrides or ())
    elif run.recipe_file.exists():
        recipe = load_recipe(run.recipe_file, overrides or ())
    elif overrides:
        raise OptionError(f"{overrides[0]} is given for {source}, which is no recipe; expected a recipe before it")
    else:
        return None, TargetConfig(name_or_path=source)
    return recipe, recipe.target


def _train_arguments(source: str, recipe) -> str | None:
    """How `drafttrain train` names the recipe; a run is another one than that of the folder."""
    if recipe is None:
        return None
    other = "" if recipe.method == "kd" else " method=kd"
    if Path(source).is_dir():
        return f"{shlex.quote(str(Path(source) / 'recipe.yaml'))} --output NEW_FOLDER{other}"
    return shlex.quote(source) + other


def reset_keys(recipe) -> dict[str, str]:
    """{dotted key: default} of what the recipe says and no small model cut from the target, or made for it, takes; the
    draft vocabulary too, which is the plan's matter.
    """
    refused = {"draft": None, "training": ("ttt_steps", "step_decay"), "features": ("layers",), "evaluation": ("tree",)}
    out = {}
    for name, keys in refused.items():
        section = getattr(recipe, name)
        for key, field in type(section).model_fields.items():
            if (keys is None or key in keys) and getattr(section, key) != field.default:
                out[f"{name}.{key}"] = json.dumps(field.default)
    if recipe.data.draft_vocab is not None:
        out["data.draft_vocab"] = "null"
    return out


def _numbers(text: str | None, kind: type, flag: str) -> list | None:
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"{flag} is {text!r}; expected numbers separated by commas") from error


def _acceptance(texts: list[str] | None) -> dict | None:
    """{size, or "" for the others: a conditional rate, or joint rates}."""
    if not texts:
        return None
    out: dict = {}
    for text in texts:
        label, equals, numbers = text.rpartition("=")
        if equals and not label:
            raise OptionError(f"--acceptance is {text!r}; expected a size before the =, e.g. fresh:128x4=.5")
        rates = _numbers(numbers, float, "--acceptance")
        out[label.strip()] = rates if len(rates) > 1 else rates[0]
    return out if "" in out else {"": 0.6, **out}


def _sizes(text: str | None, config):
    from drafttrain.plan_candidates import default_sizes, parse_sizes

    return default_sizes(config) if text is None else parse_sizes(text, config)


def _devices(
    settings, sizes: str | None, names: str, options: dict, context: int, layer_time: float | None
) -> list[dict]:
    from drafttrain.evaluate.roofline import find_device
    from drafttrain.plan import plan_device
    from drafttrain.plan_candidates import config_of

    for name in names.split(","):
        find_device(name.strip())
    name, path = settings.name_or_path, Path(settings.name_or_path).expanduser()
    config = config_of(settings)
    chosen = _sizes(sizes, config)
    layer_seconds = None if layer_time is None else layer_time * 1e-6
    if path.exists():
        name = path.stem if path.suffix == ".gguf" else path.name
    options |= {"context": context, "layer_seconds": layer_seconds, "name": name}
    return [plan_device(config, chosen, device.strip(), **options) for device in names.split(",")]


def _measured(settings, sizes: str | None, options: dict, context: int, say) -> dict:
    from drafttrain.data.progress import progress_bar
    from drafttrain.evaluate.sizes import batches
    from drafttrain.plan import KS, plan_sizes
    from drafttrain.target import load_target

    target = load_target(**settings.model_dump())
    chosen = _sizes(sizes, target.config)
    say(f"timing {len(chosen)} sizes beside {target.title}, random weights, interleaved: a minute or three")
    deepest = max(options.get("ks", KS))
    with progress_bar("planning", batches([deepest] * len(chosen), 3)) as update:
        return plan_sizes(target, chosen, context=context, progress=update, **options)


def _show(
    plans: list[dict], cost: dict | None, recipe: str | None, reset: dict[str, str] | None, as_json: bool
) -> None:
    from drafttrain.plan_cost_print import next_step, print_cost
    from drafttrain.plan_print import advice, print_plan

    if as_json:
        print(json.dumps({**({} if cost is None else {"cost": cost}), "plans": plans}))
    else:
        if cost is not None:
            print_cost(cost, console_for())
        for found in plans:
            print_plan(found, console_for())
    if cost is not None and not plans:
        say_for(as_json)(next_step(cost))
    for found in plans:
        say_for(as_json)(advice(found, recipe, reset))


def _student(source, settings, recipe, draft, report, given, ks, refused, concurrency, context, as_json) -> None:
    from drafttrain.data.run_folder import RunFolder
    from drafttrain.drafts.loading import load_draft
    from drafttrain.plan import predict_report, predict_student
    from drafttrain.plan_print import print_student
    from drafttrain.target import load_target

    wrong = [flag for flag, value in refused.items() if value is not None]
    wrong += ["--acceptance", "--k"] if report is not None and (given or ks) else []
    named = [label for label in given or {} if label]
    if wrong:
        raise OptionError(
            f"{', '.join(wrong)} given for a trained draft, whose report or folder says that. Mend: leave it out"
        )
    if draft is None and recipe is None:
        raise OptionError("--report needs the draft it is about. Mend: --draft FOLDER, or a run folder as the target")
    if named:
        raise OptionError(f"--acceptance names the size {named[0]}; expected rates alone for a trained draft")
    written = _report(report)
    rates, ks = _trained_rates(given, ks)
    target = load_target(**settings.model_dump())
    folder = draft or source
    loaded = load_draft(folder, target)
    options = {"concurrency": concurrency, "context": context}
    if written is not None:
        found = predict_report(target, loaded, written, folder, **options)
    else:
        found = {"label": loaded.method, **predict_student(target, loaded, rates, ks, **options)}
    found |= {"draft": str(folder), "device": target.device.type, "acceptance_assumed": written is None}
    if as_json:
        print(json.dumps({"student": found}))
    else:
        print_student(found, console_for())
    top = max(found["predictions"], key=lambda row: row["speedup"])
    known = RunFolder(Path(folder)).recipe_file.exists()
    again = shlex.quote(str(folder))
    again += "" if known else f" --target {shlex.quote(settings.name_or_path)}"
    say_for(as_json)(
        f"best predicted: {top['speedup']:.2f}x at K = {top['k']}. Next: drafttrain evaluate {again} --k {top['k']}"
    )


def _trained_rates(given: dict | None, ks: list[int] | None) -> tuple[list[float], list[int]]:
    """(joint rates, the K to predict at): without --k as deep as there are rates for."""
    from drafttrain.plan import ACCEPTANCE, KS, rates_of

    if ks and min(ks) < 1:
        raise OptionError(f"--k is {min(ks)}; expected numbers from 1 on")
    rates = rates_of(ACCEPTANCE if given is None else given[""], "the draft", max(ks or KS))
    ks = ks or [k for k in KS if k <= len(rates)]
    if max(ks) > len(rates):
        raise OptionError(
            f"--k is {max(ks)}, and --acceptance has {len(rates)} rates; expected a rate "
            "for each position, or one number for all"
        )
    return rates, ks


def _report(path: Path | None) -> dict | None:
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--report is {path}, which cannot be read ({error}); expected a report.json") from error
    if not isinstance(content, dict):
        raise OptionError(f"{path} holds a JSON {type(content).__name__}; expected the object of a report.json")
    return content
