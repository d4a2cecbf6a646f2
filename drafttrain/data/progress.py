"""Progress bars on stderr for anything that takes more than a few seconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(description: str, total: float) -> Iterator[Callable[..., None]]:
    """A bar; the yielded update(done, note="") sets how much of `total` is done. Without a terminal: a line at every
    fifth of the way.
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
        fifths = 0

        def update(done: float, note: str = "") -> None:
            nonlocal fifths
            bar.update(task, completed=done, note=note)
            if not console.is_terminal and total and 5 * done // total > fifths:
                fifths = 5 * done // total
                console.print(f"{description}: {done / total:.0%} {note}", highlight=False)

        yield update
