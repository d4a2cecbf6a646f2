"""The verbs that measure: evaluate, tune, compare, generate. Nothing but argument handling; cli.py registers them."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, OptionError, again, console_for, finish, open_source, say_for, training_rows
from drafttrain.cli_engine import check_engine_options, evaluate_engine
from drafttrain.data.engine_process import PYTHON

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
Quantize = Annotated[
    str | None, typer.Option(help="Also run small models (kd) with such weights: int8, int4 or int8,int4.")
]
Prompts = Annotated[
    str | None,
    typer.Option(help="JSONL, or a set: builtin, builtin:code,math, mt-bench, humaneval, gsm8k. Default: data.test."),
]
NumPrompts = Annotated[int | None, typer.Option(help="How many prompts.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Tokens to generate for each prompt.")]
Output = Annotated[Path | None, typer.Option(help="Folder for the report.")]


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
    if not isinstance(paths, list):
        raise OptionError(f"{text} holds {paths!r}; expected rank paths such as [[0], [1], [0, 0]]")
    return {"paths": paths}


def _settings(recipe, **changes):
    from drafttrain.evaluate.run import settings_with
    from drafttrain.recipe import EvaluationConfig

    for name, kind in (("k", int), ("temperature", float), ("concurrency", int)):
        if name in changes:
            changes[name] = _numbers(changes[name], kind, f"--{name}")
    if "tree" in changes:
        changes["tree"] = _tree(changes["tree"])
    if changes.get("quantize") is not None:
        changes["quantize"] = [kind.strip() for kind in changes["quantize"].split(",")]
    return settings_with(recipe.evaluation if recipe else EvaluationConfig(), **changes)


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
    quantize: Quantize = None,
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
    ] = PYTHON,
    model: Annotated[str | None, typer.Option(help="Which of the server's models. Default: its first.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
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
    given |= {"quantize": quantize}
    given |= {"prompts": prompts, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
    given |= {"k": k, "temperature": temperature, "concurrency": concurrency, "tree": tree}
    _settings(None, **given)  # What is mistyped is told before the target is loaded.
    if policy is not None:
        policy_of(policy)
    if output is not None:
        check_writable(output)
    if engine is not None or url is not None or baseline_url is not None:
        check_engine_options(given, typical or synthetic is not None, engine, url, baseline_url)
        names = (engine, url, baseline_url, engine_python, model, api_key)
        evaluate_engine(source, target, _settings, given, *names, output, as_json)
        return
    run, recipe, loaded = open_source(source, target)
    settings = _settings(recipe, **given)
    tree_of(settings.tree)
    check_writable(output or (run.path / "evaluation" if recipe else Path("evaluation")))
    rows = training_rows(recipe, run, loaded, say)
    report = evaluate_draft(source, loaded, settings, recipe=recipe, training_rows=rows, acceptance=acceptance, say=say)
    folder = output or (run.path / "evaluation" / report["prompts"]["name"] if recipe else Path("evaluation"))
    _, html = write_report(report, folder, read_log(run.log) if recipe else None)
    same = again(source, target)
    finish(report, print_table, as_json, f"report in {html}. Next: drafttrain tune {same}, or export {same}")


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
    from drafttrain.evaluate.run import tune_folder
    from drafttrain.evaluate.tune import print_tune, tune_draft

    say = say_for(as_json)
    given = {"k": k, "temperature": temperature, "top_p": top_p, "top_k": top_k, "draft_mode": draft_mode}
    given |= {"prompts": prompts, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
    _settings(None, **given, concurrency=concurrency)
    if output is not None:
        check_writable(output)
    run, recipe, loaded = open_source(source, target)
    settings = _settings(recipe, **given, concurrency=concurrency)
    folder = output or tune_folder(source)
    check_writable(folder)
    report = tune_draft(
        source,
        loaded,
        settings,
        calibration=calibration,
        concurrency=settings.concurrency,
        recipe=recipe,
        training_rows=training_rows(recipe, run, loaded, say),
        devices=[name.strip() for name in device.split(",")] if device else (),
        context=context,
        say=say,
    )
    _, html = write_report(report, folder)
    shutil.rmtree(folder / "settings", ignore_errors=True)
    files = []
    for label, settings in report["tune"]["settings"].items():
        place = folder / "settings" / label.replace(" ", "-")
        place.mkdir(parents=True)
        files += write_settings(settings, place)
        for note in settings["notes"]:
            say(f"{label}: {note}")
    written = f", engine settings in {', '.join(map(str, files))}" if files else ""
    finish(report, print_tune, as_json, f"report in {html}{written}. Next: drafttrain export {again(source, target)}")


def compare(
    sources: Annotated[list[str], typer.Argument(help="Runs, draft folders or hub ids.", metavar="RUN|DIR...")],
    target: TargetName = None,
    k: Ks = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    draft_mode: DraftMode = None,
    concurrency: Concurrency = None,
    quantize: Quantize = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    max_new_tokens: MaxNewTokens = None,
    output: Output = Path("comparison"),
    as_json: AsJson = False,
) -> None:
    """Measure several drafts on the same prompts, interleaved, with paired intervals of their differences.

    Example: drafttrain compare checkpoints/demo checkpoints/other --k 3,5
    """
    from drafttrain.data.run_folder import RunFolder
    from drafttrain.evaluate.report import check_writable, print_table, write_report
    from drafttrain.evaluate.run import compare_drafts, labels_of

    say = say_for(as_json)
    labels = labels_of(sources)
    given = {"k": k, "temperature": temperature, "top_p": top_p, "top_k": top_k, "draft_mode": draft_mode}
    given |= {"concurrency": concurrency, "prompts": prompts, "num_prompts": num_prompts}
    given |= {"max_new_tokens": max_new_tokens, "quantize": quantize}
    _settings(None, **given)
    check_writable(output)
    _, recipe, loaded = open_source(sources[0], target)
    rows: list = []
    for source in sources:
        run = RunFolder(Path(source))
        rows += training_rows(run.recipe() if run.recipe_file.exists() else None, run, loaded, say)
    settings = _settings(recipe, **given)
    report = compare_drafts(labels, loaded, settings, recipe=recipe, training_rows=rows, say=say)
    _, html = write_report(report, output)
    finish(report, print_table, as_json, f"report in {html}. Next: drafttrain tune {again(sources[0], target)}")


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
    from drafttrain.data.chat_template import Chat
    from drafttrain.drafts.loading import load_draft
    from drafttrain.evaluate.colours import coloured, legend
    from drafttrain.evaluate.run import policy_of, tree_of
    from drafttrain.nn.sampling import Sampling
    from drafttrain.recipe import parse_evaluation
    from drafttrain.specdec.decode import generate as decode

    say = say_for(as_json)
    if policy is not None:
        policy_of(policy)  # A name that is none is told before the target is loaded.
    shape = tree_of(parse_evaluation({"tree": _tree(tree)}).tree) if tree else None
    sampling = Sampling(temperature, top_p, 0, seed, "one_hot" if tree else "probabilistic")
    _, recipe, loaded = open_source(source, target)
    chat = "none" if raw else Chat.of(recipe)
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
        console.print(coloured(answer, loaded.tokenizer), highlight=False, soft_wrap=True)
        console.print()
        console.print(legend(max(answer.drafted, default=0)), highlight=False)
    say(
        f"{len(answer.tokens)} tokens in {counts.iterations} target passes (acceptance length "
        f"{counts.mean_acceptance_length:.2f}), {speed:.1f} tokens/s. "
        f"Next: drafttrain evaluate {again(source, target)}"
    )
