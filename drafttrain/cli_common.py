"""What the command line's modules share: the --json flag, where tables and messages go, what a source is."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from drafttrain.errors import UserError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; messages go to stderr.")]


def console_for() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def say_for(as_json: bool) -> Callable[[str], None]:
    """Prints messages: on stdout, or on stderr where stdout is for JSON."""
    stream = sys.stderr if as_json else None
    return lambda message: print(message, file=stream, flush=True)


class OptionError(UserError):
    """A command-line value that cannot be read."""


def find_source(source: str | Path, target: str | None):
    """(run folder, recipe or None). OptionError where neither a recipe nor `target` names the target."""
    from drafttrain.data.run_folder import RunFolder

    run = RunFolder(Path(source))
    recipe = run.recipe() if run.recipe_file.exists() else None
    if recipe is None and target is None:
        raise OptionError(f"{source} is no run folder, so its target is not known. Mend: --target NAME_OR_PATH")
    return run, recipe


def open_source(source: str, target: str | None):
    """(run folder, recipe or None, loaded target)."""
    run, recipe = find_source(source, target)
    return run, recipe, served_target(run, recipe, target)


def served_target(run, recipe, target: str | None, dtype: str | None = None):
    """The loaded target that a run's draft is served with: the one that is named, that which was tuned together with
    the draft (Medusa-2; a line on stderr says so), or the recipe's. dtype: other than the recipe's.
    """
    from drafttrain.drafts.base import tuned_words
    from drafttrain.drafts.loading import load_served
    from drafttrain.target import load_target

    if target:
        return load_target(target, dtype=dtype or "auto")
    tuned = tuned_words(run.draft)
    if tuned:
        say_for(True)(f"the draft is {tuned}")
    settings = recipe.target.model_copy(update={"dtype": dtype}) if dtype else recipe.target
    return load_served(settings, run.draft)


def training_rows(recipe, run, target, say) -> list:
    """The token ids a run was trained on; none, with a note, where they are not at hand."""
    from drafttrain.data.conversations import DataError
    from drafttrain.data.prepare import load_prepared, prepared_rows
    from drafttrain.drafts.base import tuned_target

    if recipe is None:
        return []
    try:
        if tuned_target(run.draft) is not None:  # The rows belong to the target that it was tuned from.
            return [row["input_ids"] for row in prepared_rows(run, "train")]
        return [row["input_ids"] for row in load_prepared(recipe, run, target).rows["train"]]
    except DataError as error:
        say(f"note: the training data is not at hand, overlap is not measured ({error})")
        return []


def again(source: str, target: str | None) -> str:
    """The arguments that name the same draft in the next command."""
    return f"{source} --target {target}" if target else source


def finish(report: dict, table, as_json: bool, last_line: str) -> None:
    """Print the report and the last line; status 1 where it was cut short."""
    if as_json:
        print(json.dumps(report))
    else:
        table(report, console_for())
    say_for(as_json)(last_line)
    if report.get("interrupted"):
        raise typer.Exit(1)
