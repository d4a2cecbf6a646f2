"""Progress bars on stderr for anything that takes more than a few seconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(description: str, total: float) -> Iterator[Callable[..., None]]:
    """A bar; the yielded update(done, note="") sets how much of `total` is done. Without a terminal only its end is
    printed.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total, note="")

        def update(done: float, note: str = "") -> None:
            bar.update(task, completed=done, note=note)

        yield update
