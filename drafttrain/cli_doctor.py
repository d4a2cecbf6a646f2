"""The verb `doctor`: nothing but argument handling; cli.py registers it."""

import json
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, again, console_for, open_source, say_for

Source = Annotated[str, typer.Argument(help="A run folder, a draft folder or a hub id.", metavar="RUN|DIR")]
TargetName = Annotated[str | None, typer.Option("--target", help="The target that serves. Default: the run's.")]
Only = Annotated[
    str | None,
    typer.Option(
        help="Some checks alone: fingerprint, dtype, template, mask, thinking, drift, context, vocabulary, layers, "
        "norm, rope, steps, parity, speed."
    ),
]
Samples = Annotated[int, typer.Option(help="Prompts that the target answers, plain and with the draft.", min=1)]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(doctor)


def doctor(
    source: Source, target: TargetName = None, only: Only = None, samples: Samples = 8, as_json: AsJson = False
) -> None:
    """Say why acceptance is low: measured checks of data, target, draft and costs, each PASS, FAIL or NOT MEASURED with
    evidence and mend. Exit status 1 where one fails.

    Example: drafttrain doctor checkpoints/demo --samples 4 --only layers,rope,vocabulary
    """
    from drafttrain.doctor import diagnose, diagnosis_table, last_line, names_of

    names = names_of(only)
    _, recipe, loaded = open_source(source, target)
    say = say_for(True)
    say(f"looking at {source}: {len(names)} checks, {samples} prompts; a minute or a few on a CPU")
    found = diagnose(source, loaded, recipe, only=names, samples=samples, say=say)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        console_for().print(diagnosis_table(found))
    say_for(as_json)(last_line(found, again(source, target), recipe is not None))
    raise typer.Exit(found.exit_status)
