"""`drafttrain check` and `drafttrain convert`: argument handling alone; cli.py registers them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, console_for, say_for

Draft = Annotated[str, typer.Argument(help="A draft folder, a run folder or a hub id.", metavar="DIR")]
TargetOption = Annotated[str, typer.Option(help="The target: folder, hub id or .gguf file. Its weights are not read.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(check)
    app.command()(convert)


def check(
    draft: Draft,
    target: TargetOption,
    engine: Annotated[
        str, typer.Option(help="all, or some of vllm, sglang, tensorrt-llm, llama.cpp, transformers.")
    ] = "all",
    as_json: AsJson = False,
) -> None:
    """Say for each engine whether it would serve a draft as it was trained: PASS, FAIL or UNSUPPORTED, with the mend.

    Example: drafttrain check checkpoints/demo/export/vllm --target google/gemma-3-270m
    """
    from drafttrain.export.check import check_draft, last_line, report_table

    report = check_draft(draft, target, engine)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        console_for().print(report_table(report))
    say_for(as_json)(last_line(report))
    raise typer.Exit(report.exit_status)


def convert(
    draft: Draft,
    target: TargetOption,
    to: Annotated[str, typer.Option(help="ours, speculators or legacy (SafeAILab's; of Medusa heads the first form).")],
    output: Annotated[Path, typer.Option(help="Folder to write; a former conversion in it is replaced.")],
    k: Annotated[int, typer.Option(help="Drafts a round that speculators' form names.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Write an EAGLE-3 draft, or Medusa heads, in another layout, without loss.

    Example: drafttrain convert RedHatAI/some-draft --to ours --output draft --target google/gemma-3-270m
    """
    from drafttrain.export.convert import convert_draft

    say = say_for(as_json)
    converted = convert_draft(draft, to, output, target, k)
    if as_json:
        print(json.dumps(converted))
    for note in converted["notes"]:
        say(f"note: {note}")
    say(f"{converted['method']} draft as {to} in {output}. Next: drafttrain check {output} --target {target}")
