"""Trainer callbacks: the budget in minutes, the log as JSON lines, the progress bar, and the best draft so far."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import ExportableState

from drafttrain.data.files import write_beside
from drafttrain.data.run_folder import RunError


class Budget(TrainerCallback, ExportableState):
    """Stops after `max_minutes` of wall-clock time (validation, measuring acceptance and saving included), counted
    across resumes, and tells the progress.

    progress() in [0, 1] drives the learning rate: the larger of steps done / planned and minutes spent / allowed.
    """

    def __init__(self, max_minutes: float | None = None, elapsed: float = 0.0):
        self.max_minutes, self.elapsed = max_minutes, elapsed
        self._started: float | None = None
        self._at_step = elapsed

    def state(self) -> dict:
        return {"args": {"max_minutes": self.max_minutes, "elapsed": self.seconds()}, "attributes": {}}

    def seconds(self) -> float:
        """Seconds trained so far, earlier sessions included."""
        return self.elapsed + (time.monotonic() - self._started if self._started is not None else 0.0)

    def start(self, elapsed: float = 0.0) -> None:
        """Begin to count, `elapsed` seconds into the run."""
        self.elapsed = self._at_step = elapsed
        self._started = time.monotonic()

    def progress(self, step: int, max_steps: int) -> float:
        """How much of the run is done at the last step, 0 to 1."""
        minutes = self._at_step / (60 * self.max_minutes) if self.max_minutes else 0.0
        return min(1.0, max(step / max(max_steps, 1), minutes))

    def spent(self) -> bool:
        """Whether the minutes were up at the last step."""
        return self.max_minutes is not None and self._at_step >= 60 * self.max_minutes

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Read the clock, the main process's for all: by their own, ranks would differ in rate and last step."""
        clock = [self.seconds()]
        if args.world_size > 1:
            broadcast_object_list(clock)
        self._at_step = clock[0]

    def on_step_end(self, args, state, control, **kwargs):
        if self.spent():
            control.should_training_stop = True
        return control


def check_trackers(names: Sequence[str]) -> None:
    """RunError where training.report_to names something that transformers does not know or that is not installed."""
    here = get_available_reporting_integrations()
    for name in names:
        if name not in here:
            known = name in INTEGRATION_TO_CALLBACK
            found = "which is not installed" if known else "which transformers does not know"
            mend = f"pip install {name}" if known else f"one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            raise RunError(
                f"training.report_to names {name}, {found}. Expected one of {', '.join(here) or 'none'} here, or "
                f"nothing: log.jsonl is always written. Mend: {mend}."
            )


class JsonLog(TrainerCallback):
    """Appends every log entry of the main process to log.jsonl, one JSON object a line, with step and minutes."""

    def __init__(self, path: Path, budget: Budget):
        self.path, self.budget = path, budget

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            row = {"step": state.global_step, "minutes": round(self.budget.seconds() / 60, 4), **logs}
            try:
                with open(self.path, "a") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise unwritten(self.path, error) from error


def unwritten(path: Path, error: Exception) -> RunError:
    """A file or folder of the run that could not be written."""
    why = getattr(error, "strerror", None) or error
    return RunError(
        f"{path} could not be written ({why}); what was there before and the last checkpoint are intact. Mend: free "
        "some space, then run the same command to resume."
    )


def read_log(path: Path) -> list[dict]:
    """The rows of a log.jsonl; a last line cut off by a crash is left out."""
    rows: list[dict] = []
    if not path.exists():
        return rows
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append(row)
    return rows


def cut_log(path: Path, step: int) -> None:
    """Drop the rows after `step`, the checkpoint that a resume starts from (0: none): their steps are trained again.
    RunError on a full disk.
    """
    lines = [json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= step]
    try:
        write_beside(path, lambda temporary: temporary.write_text("".join(lines)))
    except OSError as error:
        raise unwritten(path, error) from error


class Bar(TrainerCallback):
    """A progress bar on stderr: the share of the budget done, loss, acceptance at the first step, tokens per second."""

    def __init__(self, budget: Budget, notes: Callable[[], str]):
        self.budget, self.notes = budget, notes
        self._progress: Progress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        console = Console(stderr=True)
        if state.is_world_process_zero and console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
            self._progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
            self._task = self._progress.add_task("", total=1.0, note="")
            self._progress.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self._progress is not None:
            done = self.budget.progress(state.global_step, state.max_steps)
            self._progress.update(self._task, completed=done, note=f"step {state.global_step}  {self.notes()}")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero and metrics:
            console = self._progress.console if self._progress is not None else Console(stderr=True, soft_wrap=True)
            minutes = self.budget.seconds() / 60
            line = f"step {state.global_step} ({minutes:.1f} min)  {self.notes()}  "
            found = f"validation loss {metrics['eval_loss']:.3f}"
            if "eval_acceptance_length" in metrics:
                found += f"  acceptance length {metrics['eval_acceptance_length']:.2f}"
            console.print(line + found, highlight=False)

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, also after an error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
