"""The verbs that measure: evaluate, tune, compare, generate. Nothing but argument handling; cli.py registers them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, console_for, say_for
from drafttrain.errors import UserError

Source = Annotated[str, typer.Argument(help="A run folder, a draft folder or a hub id.", metavar="RUN|DIR")]
TargetName = Annotated[str | None, typer.Option(help="The target, for a draft that is no run of ours.")]
Ks = Annotated[str | None, typer.Option("--k", help="Drafts a round (of a tree: its depth), e.g. 3 or 1,3,5.")]
Temperature = Annotated[str | None, typer.Option(help="Temperatures, e.g. 0 or 0,0.8. 0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus mass, applied to target and draft alike.")]
TopK = Annotated[int | None, typer.Option(help="Likeliest tokens to sample from, for target and draft alike.")]
DraftMode = Annotated[str | None, typer.Option(help="one_hot or probabilistic, when sampling.")]
Concurrency = Annotated[str | None, typer.Option(help="Requests at a time, e.g. 1,4,16.")]
Repeats = Annotated[int | None, typer.Option(help="Passes over the prompts.")]
TreeShape = Annotated[
    str | None,
    typer.Option("--tree", help="Also run trees: 4x16 (children x nodes, EAGLE-2), or a JSON file of rank paths."),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy", help="Also run an adaptive K: confidence:0.4, entropy:0.3, svip:1.2, or goodput after tune."
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(help="JSONL, or a set: builtin, builtin:code,math, mt-bench, humaneval, gsm8k. Default: data.test."),
]
NumPrompts = Annotated[int | None, typer.Option(help="How many prompts.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Tokens to generate for each prompt.")]
Output = Annotated[Path | None, typer.Option(help="Folder for the report.")]


class OptionError(UserError):
    """A command-line value that cannot be read."""


def register(app: typer.Typer) -> None:
    """Add the verbs of this module to the command line."""
    for verb in (evaluate, tune, compare, generate):
        app.command()(verb)


def _numbers(text: str | None, kind: type, flag: str) -> list | None:
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"{flag} is {text!r}, expected numbers separated by commas, e.g. 1,3,5") from error


def _tree(text: str | None) -> dict | None:
    """--tree as the recipe's evaluation.tree."""
    if text is None:
        return None
    topk, times, nodes = text.partition("x")
    if times and topk.isdigit() and nodes.isdigit():
        return {"topk": int(topk), "nodes": int(nodes)}
    path = Path(text).expanduser()
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--tree is {text!r}; expected CHILDRENxNODES, e.g. 4x16, or a JSON file of rank paths such as "
            "[[0], [1], [0, 0]]"
        ) from error
    return {"paths": paths}


def _settings(recipe, **changes):
    from drafttrain.evaluate.run import settings_with
    from drafttrain.recipe import EvaluationConfig

    for name, kind in (("k", int), ("temperature", float), ("concurrency", int)):
        if name in changes:
            changes[name] = _numbers(changes[name], kind, f"--{name}")
    if "tree" in changes:
        changes["tree"] = _tree(changes["tree"])
    return settings_with(recipe.evaluation if recipe else EvaluationConfig(), **changes)


def _open(source: str, target: str | None):
    """(run folder, recipe or None, loaded target)."""
    from drafttrain.data.run_folder import RunFolder
    from drafttrain.evaluate.report import EvaluationError
    from drafttrain.target import load_target

    run = RunFolder(Path(source))
    recipe = run.recipe() if run.recipe_file.exists() else None
    if recipe is None and target is None:
        raise EvaluationError(f"{source} is no run folder, so its target is not known. Mend: --target NAME_OR_PATH")
    return run, recipe, load_target(target) if target else load_target(**recipe.target.model_dump())


def _training_rows(recipe, run, target, say) -> list:
    from drafttrain.data.conversations import DataError
    from drafttrain.data.prepare import load_prepared

    if recipe is None:
        return []
    try:
        return [row["input_ids"] for row in load_prepared(recipe, run, target).rows["train"]]
    except DataError as error:
        say(f"note: the training data is not at hand, overlap is not measured ({error})")
        return []


def evaluate(
    source: Source,
    target: TargetName = None,
    k: Ks = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    draft_mode: DraftMode = None,
    concurrency: Concurrency = None,
    repeats: Repeats = None,
    tree: TreeShape = None,
    policy: PolicyName = None,
    typical: Annotated[bool, typer.Option("--typical", help="Also run typical acceptance. LOSSY.")] = False,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Also accept at these joint rates, e.g. .8,.6,.4: the system apart from the draft."),
    ] = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    max_new_tokens: MaxNewTokens = None,
    engine: Annotated[str | None, typer.Option(help="Measure in vllm or sglang, not in this package's loop.")] = None,
    url: Annotated[str | None, typer.Option(help="A running server of that engine.")] = None,
    baseline_url: Annotated[str | None, typer.Option(help="The same model served without a draft.")] = None,
    engine_python: Annotated[
        Path, typer.Option(help="The interpreter of vLLM's own environment, where no server runs.")
    ] = Path(".venv-engines/bin/python"),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure acceptance and wall-clock speedup over the plain target, beside n-gram lookup and the untrained draft.

    Example: drafttrain evaluate checkpoints/demo --k 3,5 --temperature 0,0.8 --concurrency 1,4
    """
    from drafttrain.evaluate.report import EvaluationError, check_writable, print_table, write_report
    from drafttrain.evaluate.run import evaluate_draft, policy_of, tree_of
    from drafttrain.specdec.verify import Synthetic, Typical
    from drafttrain.training.callbacks import read_log

    say = say_for(as_json)
    if typical and synthetic:
        raise EvaluationError("--typical and --synthetic exclude each other; expected one lossy rule at a time")
    rates = _numbers(synthetic, float, "--synthetic")
    acceptance = Synthetic(tuple(rates)) if rates else Typical() if typical else None
    given = {"top_p": top_p, "top_k": top_k, "draft_mode": draft_mode, "repeats": repeats, "policy": policy}
    given |= {"prompts": prompts, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
    given |= {"k": k, "temperature": temperature, "concurrency": concurrency, "tree": tree}
    _settings(None, **given)  # What is mistyped is told before the target is loaded.
    if policy is not None:
        policy_of(policy)
    if output is not None:
        check_writable(output)
    if engine is not None or url is not None:
        _evaluate_engine(source, target, given, engine, url, baseline_url, engine_python, output, as_json)
        return
    run, recipe, loaded = _open(source, target)
    settings = _settings(recipe, **given)
    tree_of(settings.tree)
    if output is None and recipe is not None:
        check_writable(run.path / "evaluation")
    rows = _training_rows(recipe, run, loaded, say)
    report = evaluate_draft(source, loaded, settings, recipe=recipe, training_rows=rows, acceptance=acceptance, say=say)
    folder = output or (run.path / "evaluation" / report["prompts"]["name"] if recipe else Path("evaluation"))
    _, html = write_report(report, folder, read_log(run.log) if recipe else None)
    _show(report, print_table, as_json)
    say(f"report in {html}. Next: drafttrain tune {source}, or drafttrain export {source}")


def _evaluate_engine(source, target, given, engine, url, baseline_url, python, output, as_json) -> None:
    from drafttrain.data.run_folder import RunFolder
    from drafttrain.evaluate.engine_run import evaluate_in_vllm, evaluate_served
    from drafttrain.evaluate.report import print_table, write_report
    from drafttrain.export.eagle3 import VLLM_WITHOUT_HOOKS

    say = say_for(as_json)
    if engine not in (None, "vllm", "sglang") or (url is None and engine != "vllm"):
        raise OptionError(
            f"--engine is {engine!r} with the url {url}; expected vllm, or vllm or sglang with --url http://host:port"
        )
    unread = [name for name in ("tree", "policy", "repeats") if given[name] is not None]
    if unread:
        raise OptionError(f"--{unread[0]} is not for engines: they draft as they were started. Mend: leave it out")
    if url is not None:
        run = RunFolder(Path(source))
        recipe = run.recipe() if run.recipe_file.exists() else None
        name = target or (recipe.target.name_or_path if recipe else source)
        chat = recipe.data.chat if recipe else "auto"
        options = {"baseline_url": baseline_url, "engine": engine, "chat": chat, "checkpoint": source, "say": say}
        report = evaluate_served(url, name, _settings(recipe, **given), **options)
    else:
        run, recipe, loaded = _open(source, target)
        impl = "transformers" if loaded.config.model_type in VLLM_WITHOUT_HOOKS else "auto"
        rows = _training_rows(recipe, run, loaded, say)
        options = {"python": python, "model_impl": impl, "recipe": recipe, "training_rows": rows, "say": say}
        report = evaluate_in_vllm(source, loaded, _settings(recipe, **given), **options)
    folder = output or (run.path / "evaluation" / f"{engine or 'server'}" if recipe else Path("evaluation"))
    _, html = write_report(report, folder)
    _show(report, print_table, as_json)
    say(f"report in {html}. Next: drafttrain evaluate {source}, to compare with this package's loop")


def _show(report: dict, table, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
    else:
        table(report, console_for())


def tune(
    source: Source,
    target: TargetName = None,
    k: Ks = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    draft_mode: DraftMode = None,
    concurrency: Concurrency = None,
    prompts: Prompts = None,
    calibration: Annotated[
        str | None, typer.Option(help="Prompts to calibrate on, other than those measured. Default: data.validation.")
    ] = None,
    num_prompts: NumPrompts = None,
    max_new_tokens: MaxNewTokens = None,
    device: Annotated[
        str | None, typer.Option(help="Also predict for devices: A100, H100, H200, B200, L40S, 4090, cpu.")
    ] = None,
    context: Annotated[int, typer.Option(help="Cached tokens of a request, for those predictions.")] = 1024,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Find the best K for each number of requests at a time: predicted by the cost model, checked by measuring. Writes
    the engines' own settings.

    Example: drafttrain tune checkpoints/demo --k 1,2,3,4,5 --concurrency 1,4
    """
    from drafttrain.evaluate.engine_settings import write_settings
    from drafttrain.evaluate.report import check_writable, write_report
    from drafttrain.evaluate.tune import print_tune, tune_draft

    say = say_for(as_json)
    given = {"k": k, "temperature": temperature, "top_p": top_p, "top_k": top_k, "draft_mode": draft_mode}
    given |= {"prompts": prompts, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
    _settings(None, **given, concurrency=concurrency)
    if output is not None:
        check_writable(output)
    run, recipe, loaded = _open(source, target)
    settings = _settings(recipe, **given, concurrency=concurrency)
    folder = output or (run.path / "evaluation" / "tune" if recipe else Path("tune"))
    check_writable(folder)
    report = tune_draft(
        source,
        loaded,
        settings,
        calibration=calibration,
        concurrency=settings.concurrency,
        recipe=recipe,
        training_rows=_training_rows(recipe, run, loaded, say),
        devices=[name.strip() for name in device.split(",")] if device else (),
        context=context,
        say=say,
    )
    _, html = write_report(report, folder)
    files = [path for settings in report["tune"]["settings"].values() for path in write_settings(settings, folder)]
    _show(report, print_tune, as_json)
    written = f", engine settings in {', '.join(map(str, files))}" if files else ""
    say(f"report in {html}{written}. Next: drafttrain export {source}")


def compare(
    sources: Annotated[list[str], typer.Argument(help="Runs, draft folders or hub ids.", metavar="RUN|DIR...")],
    target: TargetName = None,
    k: Ks = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    draft_mode: DraftMode = None,
    concurrency: Concurrency = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    max_new_tokens: MaxNewTokens = None,
    output: Output = Path("comparison"),
    as_json: AsJson = False,
) -> None:
    """Measure several drafts of any kind on the same prompts, interleaved, with paired intervals of their differences.

    Example: drafttrain compare checkpoints/demo checkpoints/other --k 3,5
    """
    from drafttrain.evaluate.report import check_writable, print_table, write_report
    from drafttrain.evaluate.run import compare_drafts, labels_of

    say = say_for(as_json)
    labels = labels_of(sources)
    given = {"k": k, "temperature": temperature, "top_p": top_p, "top_k": top_k, "draft_mode": draft_mode}
    given |= {"concurrency": concurrency, "prompts": prompts, "num_prompts": num_prompts}
    given |= {"max_new_tokens": max_new_tokens}
    _settings(None, **given)
    check_writable(output)
    _, recipe, loaded = _open(sources[0], target)
    report = compare_drafts(labels, loaded, _settings(recipe, **given), recipe=recipe, say=say)
    _, html = write_report(report, output)
    _show(report, print_table, as_json)
    say(f"report in {html}. Next: drafttrain tune {sources[0]}")


def generate(
    source: Source,
    prompt: Annotated[str, typer.Argument(help="The text to continue, or the question to answer.")],
    target: TargetName = None,
    k: Annotated[int, typer.Option("--k", help="Drafts a round.")] = 4,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    tree: TreeShape = None,
    policy: PolicyName = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, each accepted draft coloured by its position in the round; the target's own tokens are plain.

    Example: drafttrain generate checkpoints/demo "def read_config(path):" --k 4
    """
    from drafttrain.data.chat import prompt_ids
    from drafttrain.drafts.loading import load_draft
    from drafttrain.evaluate.colours import coloured, legend
    from drafttrain.evaluate.run import policy_of, tree_of
    from drafttrain.nn.sampling import Sampling
    from drafttrain.recipe import TreeConfig
    from drafttrain.specdec.decode import generate as decode

    say = say_for(as_json)
    if policy is not None:
        policy_of(policy)  # A name that is none is told before the target is loaded.
    shape = tree_of(TreeConfig(**_tree(tree))) if tree else None
    sampling = Sampling(temperature, top_p, 0, seed, "one_hot" if tree else "probabilistic")
    _, recipe, loaded = _open(source, target)
    chat = "none" if raw else recipe.data.chat if recipe else "auto"
    ids = prompt_ids([{"role": "user", "content": prompt}], loaded.tokenizer, chat)
    draft = load_draft(source, loaded)
    proposer = draft.proposer(loaded, shape)
    adaptive = policy_of(policy, source, draft.method)(1) if policy else None
    done = decode(loaded, [ids], proposer, k=k, sampling=sampling, max_new_tokens=max_new_tokens, policy=adaptive)
    answer, counts = done.generations[0], done.counts
    speed = (len(answer.tokens) - 1) / answer.seconds if answer.seconds else 0.0
    if as_json:
        facts = {"acceptance_length": counts.mean_acceptance_length, "tokens_per_second": speed}
        facts["per_position_acceptance"] = counts.per_position_acceptance
        print(json.dumps({"text": answer.text, "tokens": answer.tokens, "finish": answer.finish, **facts}))
    else:
        console = console_for()
        console.print(coloured(answer, loaded.tokenizer), highlight=False)
        console.print()
        console.print(legend(max(answer.drafted, default=0)), highlight=False)
    say(
        f"{len(answer.tokens)} tokens in {counts.iterations} target passes (acceptance length "
        f"{counts.mean_acceptance_length:.2f}), {speed:.1f} tokens/s. Next: drafttrain evaluate {source}"
    )
