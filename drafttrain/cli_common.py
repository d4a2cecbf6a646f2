"""What the command line's modules share: the --json flag, where tables and messages go."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; messages go to stderr.")]


def console_for() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def say_for(as_json: bool) -> Callable[[str], None]:
    """Prints messages: on stdout, or on stderr where stdout is for JSON."""
    stream = sys.stderr if as_json else None
    return lambda message: print(message, file=stream, flush=True)
