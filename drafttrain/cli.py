"""The command line: one verb per stage, nothing but argument handling. `python -m drafttrain VERB` is the same."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from drafttrain import __version__
from drafttrain.cli_check import register as register_checking
from drafttrain.cli_common import AsJson, console_for, find_source, say_for, served_target
from drafttrain.cli_doctor import register as register_doctor
from drafttrain.cli_init import register as register_init
from drafttrain.cli_measure import register as register_measuring
from drafttrain.cli_plan import register as register_planning
from drafttrain.cli_publish import register as register_publishing
from drafttrain.cli_serve import register as register_serving
from drafttrain.errors import UserError

app = typer.Typer(
    name="drafttrain",
    help="Train draft models for speculative decoding and prove what they are worth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
RecipeArgument = Annotated[
    Path, typer.Argument(help="Recipe (.yaml), or the folder of an existing run.", metavar="RECIPE")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Dotted overrides, e.g. training.learning_rate=1e-4.", metavar="KEY=VALUE")
]
Output = Annotated[Path | None, typer.Option(help="Run folder. Default: checkpoints/<recipe's name>.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Refuse to continue an existing run: the folder must be empty.")]


def main() -> None:
    """Run the command line."""
    run_command(lambda: app(prog_name="drafttrain"))


def run_command(command: Callable[[], None]) -> None:
    """Call a command line, this one's or a script's. A UserError is printed without a traceback and exits with its
    status: 1, or 128 and the number of the signal that stopped training.
    """
    try:
        command()
    except UserError as error:
        if str(error):
            message = Text.assemble((f"{error.word}:", "bold red"), f" {error}")
            Console(stderr=True, soft_wrap=True).print(message, highlight=False)
        sys.exit(error.status)


def _version(asked: bool) -> None:
    if asked:
        print(f"drafttrain {__version__}")
        raise typer.Exit


@app.callback()
def quiet(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train draft models for speculative decoding and prove what they are worth."""
    quiet_libraries()


def quiet_libraries() -> None:
    """Bars are drawn by this package where something takes long; the libraries' own for a second's work are switched
    off. DeepSpeed, which accelerate imports wherever it is installed, warns on standard output, which is --json's.
    """
    import logging

    import datasets
    from transformers.utils.logging import disable_progress_bar

    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)
    disable_progress_bar()
    datasets.disable_progress_bars()


def _open_run(
    recipe_path: Path, overrides, output: Path | None, fresh: bool, method: str | None = None, claims: bool = True
):
    from drafttrain.data.run_folder import RunError, RunFolder
    from drafttrain.recipe import load_recipe

    if recipe_path.is_dir():
        run = RunFolder.find(recipe_path)
        recipe, folder = load_recipe(run.recipe_file, overrides or ()), output or recipe_path
    else:
        recipe, folder = load_recipe(recipe_path, overrides or ()), output or Path("checkpoints") / recipe_path.stem
    if method is not None and recipe.method != method:
        raise RunError(
            f"{recipe_path} has method {recipe.method}, this script trains {method}. Mend: use the script of that "
            "method."
        )
    run = RunFolder(folder)
    if claims:
        run.claim(recipe, fresh)
    return recipe, run


@app.command()
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    output: Output = None,
    fresh: Fresh = False,
    show_mask: Annotated[
        bool,
        typer.Option("--show-mask", help="Only show the mask of 3 conversations, or of as many as a number says."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Store features also where they take much of the disk.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn conversations into training data: answers, ids and loss mask, draft vocabulary, features.

    Example: drafttrain prepare recipes/gemma3/eagle3-gemma3-270m.yaml --show-mask 5
    """
    from drafttrain.data.prepare import prepare as run_prepare
    from drafttrain.evaluate.cpu_speed import bf16_note
    from drafttrain.target import load_target
    from drafttrain.training.signals import Stop

    say = say_for(as_json)
    if show_mask:
        counts = [int(word) for word in overrides or () if word.isdecimal() and int(word)]
        rest = [word for word in overrides or () if not word.isdecimal()]
        _show_mask(recipe, rest, counts[0] if counts else 3, as_json)
        return
    settings, run = _open_run(recipe, overrides, output, fresh)
    with run.lock(), Stop().listening(run.path):
        target = load_target(**settings.target.model_dump())
        if note := bf16_note(target.device, target.dtype):
            say(f"note: {note}")
        prepared = run_prepare(settings, run, target, say, yes)
    if as_json:
        print(json.dumps({"folder": str(run.path), **prepared.manifest}))
    say(f"prepared data in {run.prepared}. Next: drafttrain train {run.path}")


def _show_mask(recipe_path: Path, overrides: list[str], count: int, as_json: bool) -> None:
    from drafttrain.data.run_folder import RunFolder
    from drafttrain.data.show_mask import mask_report, mask_text
    from drafttrain.recipe import load_recipe
    from drafttrain.target import load_target

    file = RunFolder.find(recipe_path).recipe_file if recipe_path.is_dir() else recipe_path
    recipe = load_recipe(file, overrides)
    target = load_target(**recipe.target.model_dump())
    report = mask_report(recipe, target, count)
    if as_json:
        print(json.dumps(report.facts(target.tokenizer)))
    else:
        console = console_for()
        text = mask_text(report, target.tokenizer, console.is_terminal and not console.no_color)
        console.print(text, soft_wrap=True, highlight=False)
    say_for(as_json)(f"nothing was written. Next: drafttrain prepare {recipe_path}")


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    output: Output = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Train the recipe's draft; prepares what is missing and resumes what was begun.

    Example: drafttrain train recipes/gemma3/eagle3-gemma3-270m.yaml training.max_minutes=20
    """
    run_training(recipe, overrides, output, fresh, as_json)
    end_training()


def end_training() -> None:
    """What a process does when all that it was to train is trained."""
    from drafttrain.training.run import leave_processes

    leave_processes()


def run_training(recipe: Path, overrides, output, fresh: bool, as_json: bool, method: str | None = None) -> None:
    """What `train` and the scripts for `accelerate launch` do. Only the main process claims and locks the run
    folder.
    """
    from contextlib import nullcontext

    from drafttrain.data.run_folder import RunFolder
    from drafttrain.training.run import processes
    from drafttrain.training.run import train as fit

    quiet_libraries()
    state = processes()
    say = say_for(as_json)
    with state.main_process_first():
        settings, run = _open_run(recipe, overrides, output, fresh, method, claims=state.is_main_process)
    with run.lock() if state.is_main_process else nullcontext():
        fit(settings, run, say=say)
    if state.is_main_process:
        if as_json:
            facts = json.loads((RunFolder(run.path).draft / "drafttrain.json").read_text())
            print(json.dumps({"folder": str(run.path), "draft": str(run.draft), **facts}))
        say(f"Next: drafttrain evaluate {run.path}")


def run_training_script(method: str, words: str) -> None:
    """What scripts/train_*.py are: `train` for the recipes of one method; words: its help."""

    def command(
        recipe: RecipeArgument,
        overrides: Overrides = None,
        output: Output = None,
        fresh: Fresh = False,
        as_json: AsJson = False,
    ) -> None:
        run_training(recipe, overrides, output, fresh, as_json, method)
        end_training()

    command.__doc__ = words
    run_command(lambda: typer.run(command))


register_measuring(app)
register_planning(app)
register_init(app)
register_serving(app)
register_checking(app)
register_doctor(app)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run folder or a draft folder.", metavar="RUN")],
    engine: Annotated[str | None, typer.Option(help="vllm, sglang, tensorrt-llm, llama.cpp or transformers.")] = None,
    target: Annotated[str | None, typer.Option(help="The target, for a draft that is no run of ours.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float16; default: as evaluated.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write. Default: <run>/export/<engine>.")] = None,
    k: Annotated[int | None, typer.Option(help="Drafts a round. Default: 3, or all Medusa heads.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Write the directory that serving engines load, and print the serve command.

    Example: drafttrain export checkpoints/demo --engine vllm
    """
    from drafttrain.data.features import DTYPES
    from drafttrain.drafts.loading import draft_method, find_draft
    from drafttrain.export.base import ExportError
    from drafttrain.export.folder import export_draft
    from drafttrain.export.serve import check_engine, serve_command

    say = say_for(as_json)
    run, recipe = find_source(source, target)
    engine = engine or (recipe.export.engine if recipe else "vllm")
    draft_folder = find_draft(source)
    method = draft_method(draft_folder)
    check_engine(engine, method, draft_folder)
    if k is None and method != "medusa":
        k = 3
    if dtype is not None and dtype not in DTYPES:
        raise ExportError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    loaded = served_target(run, recipe, target)
    # Not in a folder that has a hub id's name: the id would then mean that folder.
    home = source if source.exists() else Path("checkpoints") / source.name
    folder = output or home / "export" / engine
    k = export_draft(draft_folder, loaded, folder, DTYPES[dtype] if dtype else None, k, engine)
    command = serve_command(engine, loaded, folder, k, method)
    if as_json:
        print(json.dumps({"folder": str(folder), "engine": engine, "command": command}))
    if method == "medusa" and engine == "vllm" and k > 1:
        say(f"all {k} heads draft; with fewer num_speculative_tokens vLLM builds the first ones alone")
    say(f"draft for {engine} in {folder}. Next: {command or 'load the folder in the engine as its draft'}")


register_publishing(app)


@app.command()
def demo(
    target: Annotated[str | None, typer.Option(help="Another target: hub id or folder. Default: Gemma 3 270M.")] = None,
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 9.0,
    output: Annotated[Path, typer.Option(help="Run folder.")] = Path("checkpoints/demo"),
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """The whole road on a small real model, on this machine: data, training, evaluation, export, report.

    Example: drafttrain demo
    """
    from drafttrain.demo import run_demo

    report = run_demo(target, minutes, output, fresh, say_for(as_json), None if as_json else console_for())
    if as_json:
        print(json.dumps(report))
