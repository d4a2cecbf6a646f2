"""`drafttrain publish`: argument handling alone; cli.py registers it."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, console_for, say_for


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(publish)


def publish(
    source: Annotated[str, typer.Argument(help="A run folder, or the folder of an export.", metavar="RUN|EXPORT")],
    to: Annotated[str, typer.Option("--to", help="The repository on the hub.", metavar="OWNER/NAME")],
    engine: Annotated[
        str | None, typer.Option(help="Which export, and what it is checked for. Default: the recipe's engine.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The target, for an export that is no run of ours.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The target on the hub, for a target that is a file or a folder here.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, write the folder and show it; send nothing, need no network.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder to upload. Default: <run>/publish/<engine>.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish an exported draft on the Hugging Face hub: checked, with its model card and its report beside it.

    Example: drafttrain publish checkpoints/demo --to me/gemma-3-270m-eagle3 --dry-run
    """
    from drafttrain import publish as publishing

    say = say_for(as_json)
    publishing.check_repo(to)
    if base_model is not None:
        publishing.check_repo(base_model, "--base-model")
    exported = publishing.Exported.find(source, engine, target)
    report = publishing.check_served(exported)
    place = output or exported.place
    files = publishing.build_folder(exported, to, place, base_model)
    if not as_json:
        console_for().print(publishing.files_table(files, place))
    for note in [*report.engines[0].notes, *publishing.notes_of(exported, files)]:
        say(f"note: {note}")
    sent = {"url": None, "commit": None}
    if not dry_run:
        sent = publishing.upload(place, to, private, say)
    if as_json:
        sizes = {str(path.relative_to(place)): path.stat().st_size for path in files}
        print(json.dumps({"folder": str(place), "engine": exported.engine, "repo": to, "files": sizes, **sent}))
    if dry_run:
        options = [f"--engine {engine}"] if engine else []
        options += [f"--target {shlex.quote(target)}"] if target else []
        options += [f"--base-model {base_model}"] if base_model else []
        options += ["--private"] if private else []
        say(
            f"{exported.engine}: PASS; {place} is ready, nothing was sent. "
            f"Next: drafttrain publish {' '.join([shlex.quote(source), '--to', to, *options])}"
        )
    else:
        say(f"published at {sent['url']}. Next: drafttrain check {to} --target {exported.target}")
