"""SIGTERM, SIGINT (Ctrl-C) and SIGUSR1: a run that is asked to stop ends its step, saves a checkpoint and says how to
go on.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafttrain.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
AGAIN = 3.0
"""Seconds: a launcher passes the terminal's Ctrl-C on, so an earlier second one is the same one."""


class Interrupted(UserError):
    """A run that was asked to stop and did. status: 128 + the signal's number, as a shell has it (143 for SIGTERM, 130
    for SIGINT, 138 for SIGUSR1). No words: another process of the same run says them.
    """

    word = "stopped"

    def __init__(self, number: int, words: str = ""):
        super().__init__(words)
        self.status = 128 + number


class _Now(BaseException):
    """Unwinds whatever runs, past every handler of errors."""


class Stop:
    """What a run was asked. Inside `listening` a signal ends the work at once, as nothing of it needs to be saved
    (files are whole or not there); between `hold` and `release` it is only noted in `number` (0: none), for the trainer
    to act on where a step ends. A second Ctrl-C ends the work at once there too.
    """

    def __init__(self):
        self.number, self.holds = 0, False
        self._first = 0.0

    def hold(self) -> None:
        """From here on signals are noted."""
        self.holds = True

    def release(self) -> None:
        """From here on they end the work at once. One that was noted has been acted on by now."""
        self.holds = False

    def _came(self, number: int, frame) -> None:
        first = not self.number
        if first:
            self.number, self._first = number, time.monotonic()
        insists = number == signal.SIGINT and time.monotonic() - self._first >= AGAIN
        if (first and not self.holds) or (not first and insists):
            raise _Now

    @contextmanager
    def listening(self, folder: Path, speaks: bool = True) -> Iterator[None]:
        """Handle the signals for a run in `folder`. Raises Interrupted where one ended the work; speaks: with the words
        how to go on. Does nothing outside the main thread, which alone may handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._came) for number in SIGNALS}
        try:
            yield
        except _Now:
            raise interrupted(self.number, folder, "nothing unfinished is kept", speaks) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def interrupted(number: int, folder: Path, kept: str, speaks: bool = True) -> Interrupted:
    """The error to end a run in `folder` with. kept: what there is to go on from."""
    name = signal.Signals(number).name
    words = f"{name} came; {kept}. To go on, run the same command again, or: drafttrain train {folder}"
    return Interrupted(number, words if speaks else "")
