"""The verb `init`: argument handling alone; cli.py registers it."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, say_for

Files = Annotated[list[str] | None, typer.Option(help="Conversations to train on; may be given several times.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(init)


def init(
    target: Annotated[str, typer.Option(help="Hub id, folder, .gguf or config.json.", metavar="ID|FOLDER|FILE")],
    method: Annotated[str, typer.Option(help="eagle3, medusa or kd.")] = "eagle3",
    output: Annotated[Path | None, typer.Option(help="Recipe to write. Default: METHOD-TARGET.yaml here.")] = None,
    data: Files = None,
    validation: Annotated[list[str] | None, typer.Option(help="Conversations to choose the best draft by.")] = None,
    test: Annotated[list[str] | None, typer.Option(help="Prompts to report on.")] = None,
    memory: Annotated[float, typer.Option(help="GiB of one GPU, for the batch size.")] = 80.0,
    sibling: Annotated[str | None, typer.Option(help="kd: a small model of the same vocabulary.")] = None,
    name: Annotated[str | None, typer.Option(help="What the recipe calls a target given as config.json.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented recipe for a target, from its config alone: no weights are read.

    Example: drafttrain init --target Qwen/Qwen3-8B --method eagle3
    """
    from drafttrain.init import default_path, make_recipe, placed, read_facts, write_recipe

    facts = read_facts(target, name)
    path = output or default_path(facts, method)
    files = tuple(placed(given or (), path.parent) for given in (data, validation, test))
    text = make_recipe(facts, method, files, memory, sibling)
    recipe = write_recipe(text, path, overwrite)
    if as_json:
        print(json.dumps({"recipe": str(path), "settings": recipe.model_dump(mode="json")}))
    say_for(as_json)(f"recipe in {path}. Next: read its comments, then drafttrain prepare {shlex.quote(str(path))}")
