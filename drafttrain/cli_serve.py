"""`drafttrain serve-check`: argument handling alone; cli.py registers it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.cli_common import AsJson, console_for, find_source, say_for, served_target
from drafttrain.data.engine_process import PYTHON, check_python


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(name="serve-check")(serve_check)


def serve_check(
    source: Annotated[str, typer.Argument(help="An exported draft, a run folder or a hub id.", metavar="DIR")],
    target: Annotated[str | None, typer.Option(help="The target, for a draft that is no run of ours.")] = None,
    url: Annotated[str | None, typer.Option(help="A running vLLM server. Default: vLLM is started here.")] = None,
    engine_python: Annotated[
        Path, typer.Option(help="The interpreter of vLLM's own environment, where no server runs.")
    ] = PYTHON,
    k: Annotated[int | None, typer.Option(help="Drafts a round. Default: 3, or all Medusa heads.", min=1)] = None,
    prompts: Annotated[
        str, typer.Option(help="JSONL, or a set: builtin, builtin:code,math, mt-bench, humaneval, gsm8k.")
    ] = "builtin",
    num_prompts: Annotated[int, typer.Option(help="How many prompts.", min=2)] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)] = 32,
    dtype: Annotated[str, typer.Option(help="Of both sides; in bfloat16 texts part at ties.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Serve the draft in a real engine and compare what it accepts with our own loop: PASS, or where they part.

    Example: drafttrain serve-check checkpoints/demo/export/vllm --target google/gemma-3-270m
    """
    from drafttrain.data.chat_template import Chat
    from drafttrain.evaluate.agreement import agreement_table
    from drafttrain.evaluate.prompt_sets import load_prompt_set, prompt_tokens
    from drafttrain.export.serve_check import parting_words
    from drafttrain.export.serve_check import serve_check as run_check

    say = say_for(as_json)
    run, recipe = find_source(source, target)
    if url is None:
        check_python(engine_python, "--engine-python PATH, or --url of a running server")
    loaded = served_target(run, recipe, target, dtype)
    rows = load_prompt_set(prompts, num_prompts, 0)
    ids = [list(prompt_tokens(row, loaded, Chat.of(recipe))) for row in rows]
    result = run_check(source, loaded, ids, k=k, max_new_tokens=max_new_tokens, python=engine_python, url=url, say=say)
    if as_json:
        print(json.dumps(result))
    else:
        console_for().print(agreement_table(result, result["engine"]["name"]))
    for line in parting_words(result):
        say(line)
    say("PASS" if result["agrees"] else "FAIL: the engine does not accept what our loop accepts")
    if not result["agrees"]:
        raise typer.Exit(1)
