"""Bad steps: a loss or gradient norm that is not finite, or far above those before it. The batch is written down, then
training stops or goes on without that step.

A spike is more than `spike_factor` times the running median over the last good steps; a median, as one spike moves a
mean. It is off unless asked for: clipping bounds what a finite spike does, and what is far depends on data and batch.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import gather_object
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from drafttrain.data.batching import row_name
from drafttrain.data.files import write_json
from drafttrain.data.run_folder import RunError
from drafttrain.drafts.base import Batch
from drafttrain.nn.fused_losses import StepFigures
from drafttrain.recipe import TrainingConfig
from drafttrain.training.callbacks import unwritten
from drafttrain.training.checkpoints import CheckpointingTrainer
from drafttrain.training.figures import added
from drafttrain.training.signals import Stop

WINDOW, FEWEST = 64, 16
"""Good steps that the median is of, and how many it takes before anything is called a spike."""
MOST_DUMPS = 100
NAMED = 8
"""Rows that an error names; the dump has all."""


@dataclass
class StepRecord:
    """What one rank has run of the step under way: its batches without features, the loss of each (its part of the
    step's, as the trainer divides it), and the figures, summed.
    """

    batches: list[Batch] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    figures: StepFigures | None = None

    def add(self, batch: Batch, loss: Tensor, figures: StepFigures) -> None:
        """Note a batch before its backward pass; no tensor is copied."""
        self.batches.append(Batch(batch.input_ids, batch.loss_mask, batch.lengths, batch.labels, batch.index))
        self.losses.append(loss.detach())
        self.figures = added(self.figures, figures)

    def loss(self) -> Tensor:
        """The sum over this rank's batches, fp32 scalar."""
        return torch.stack(self.losses).float().sum()

    def plain(self, rank: int, rows: Sequence[dict]) -> list[dict]:
        """For a dump: [{"rank", "loss", "rows": [{"index", "source", "input_ids", "loss_mask"}]}]; an index below 0 is
        a row that the draft wrote itself.
        """
        names = {row["index"]: row_name(row) for row in rows}
        return [
            {
                "rank": rank,
                "loss": plain_number(loss.item()),
                "rows": [
                    {
                        "index": index,
                        "source": names.get(index, "what the draft wrote itself"),
                        "input_ids": batch.input_ids[b, :length].tolist(),
                        "loss_mask": batch.loss_mask[b, :length].int().tolist(),
                    }
                    for b, (index, length) in enumerate(zip(batch.index.tolist(), batch.lengths.tolist(), strict=True))
                ],
            }
            for batch, loss in zip(self.batches, self.losses, strict=True)
        ]


class Guard(TrainerCallback, ExportableState):
    """Judges each step by its loss (all ranks') and gradient norm, before the optimizer takes it.

    All ranks see the same figures, so that all decide alike. The medians' window is part of a checkpoint: a resumed run
    judges as one that was never stopped. skipped: steps left out so far; in_a_row: of them the last ones.
    """

    def __init__(self, config: TrainingConfig):
        self.action, self.factor, self.most = config.on_bad_step, config.spike_factor, config.max_skips
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped = self.in_a_row = 0

    def state(self) -> dict:
        kept = {name: getattr(self, name) for name in ("losses", "norms", "skipped", "in_a_row")}
        return {"args": {}, "attributes": kept}

    def restore(self, state: dict | None) -> None:
        """What a checkpoint holds of `state`; None: it was written by an earlier version."""
        for name, value in (state or self.state())["attributes"].items():
            setattr(self, name, value)

    def judge(self, loss: float, norm: float | None) -> tuple[str, str] | None:
        """What is wrong with a step, ("loss is 9.1", " (7 times the median of the steps before)"); None: it is good,
        and joins the medians. norm None: it is not known.
        """
        found = self._wrong("loss", loss, self.losses)
        if found is None and norm is not None:
            found = self._wrong("gradient norm", norm, self.norms)
        if found is not None:
            self.skipped += 1
            self.in_a_row += 1
            return found
        self.in_a_row = 0
        self.losses = [*self.losses, loss][-WINDOW:]
        if norm is not None:
            self.norms = [*self.norms, norm][-WINDOW:]
        return None

    def _wrong(self, name: str, value: float, before: Sequence[float]) -> tuple[str, str] | None:
        if not math.isfinite(value):
            return f"{name} is {value}", ""
        median = statistics.median(before) if len(before) >= FEWEST else math.inf
        if self.factor is None or value <= self.factor * median:
            return None
        return f"{name} is {value:.4g}", f" ({value / median:.3g} times the median of the steps before)"

    def medians(self) -> dict[str, float | None]:
        """Of the last good steps, for a dump."""
        pairs = (("median_loss", self.losses), ("median_grad_norm", self.norms))
        return {name: statistics.median(values) if values else None for name, values in pairs}

    def mend(self) -> str:
        """The rest of the error that a bad step stops a run with."""
        if self.action == "skip":
            return (
                f"{self.in_a_row} steps in a row were bad, training.max_skips is {self.most}. The last checkpoint is "
                "intact. Mend: look at these rows, or a fresh run with a lower training.learning_rate."
            )
        return (
            "The last checkpoint is intact. Mend: look at these rows, then run the same command to resume, with "
            "training.on_bad_step=skip to leave this step out; or a fresh run with a lower training.learning_rate."
        )

    def stops(self) -> bool:
        """Whether the bad step just judged ends the training."""
        return self.action == "stop" or self.in_a_row > self.most


class GuardedTrainer(CheckpointingTrainer):
    """Trainer that judges each step, and learns there, with all ranks, of a signal that one of them was sent.

    record: what this rank has run of the step under way; sums: figures of the good steps since the last line of the
    log, of steps_logged - steps_skipped of them; asked: the signal's number, 0 for none.
    """

    guard: Guard
    stop: Stop
    rows: dict[str, list[dict]]
    record: StepRecord
    sums: StepFigures | None
    loss_before: Tensor
    steps_logged: int
    steps_skipped: int
    asked: int

    def check_engine(self) -> None:
        """RunError where bad steps are to be skipped and the engine has taken a step before it can be judged."""
        if self.zero and self.config.on_bad_step == "skip":
            raise RunError(
                "training.on_bad_step is skip, and DeepSpeed takes its step together with the backward pass. Expected "
                "stop. Mend: training.on_bad_step=stop, or launch with recipes/accelerate/fsdp2.yaml."
            )

    def _get_grad_norm(self, model, grad_norm=None):
        """Trainer's. With it the step is judged, just before the optimizer takes it: a bad one stops the training, or
        leaves the weights as they are. None then: a skipped step has no norm in the log.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm)
        record, self.record = self.record, StepRecord()
        loss, self.asked = self._agree(record.loss(), self.stop.number)
        norm = norm_of(grad_norm)
        found = self.guard.judge(loss, norm)
        self.steps_logged += 1
        if found is None:
            self.sums = added(self.sums, record.figures)
            return grad_norm
        step, stops = self.state.global_step + 1, self.guard.stops()
        facts = {"found": "".join(found), "loss": plain_number(loss), "grad_norm": plain_number(norm)}
        facts |= {**self.guard.medians(), "learning_rate": self._get_learning_rate(), "skipped": not stops}
        main, rank = self.is_world_process_zero(), self.accelerator.process_index
        rows = dump(self.run.path, step, facts, record, self.rows["train"], main, rank)
        what = f"The {found[0]} at step {step}{found[1]} on {rows}"
        if stops:
            raise RunError(f"{what}, written to bad_batches/step-{step}.json. {self.guard.mend()}")
        drop_gradients(model)
        self._tr_loss.copy_(self.loss_before)
        self.steps_skipped += 1
        if main:
            Console(stderr=True, soft_wrap=True).print(f"skipped a step. {what}", highlight=False, markup=False)
        return None

    def _agree(self, loss: Tensor, number: int) -> tuple[float, int]:
        """The step's loss over all ranks, and the signal that any of them was sent (0: none)."""
        if self.accelerator.num_processes == 1:
            return float(loss), number
        told = self.accelerator.gather(torch.stack([loss, torch.full_like(loss, number)])).view(-1, 2)
        return float(told[:, 0].mean()), int(told[:, 1].max())

    def cut_short(self) -> bool:
        """Whether a signal has come to any rank; all ranks ask, and know it as `asked` from then on."""
        self.asked = max(self.asked, self._agree(torch.zeros((), device=self.args.device), self.stop.number)[1])
        return self.asked > 0

    def end_with_a_checkpoint(self) -> None:
        """Nothing else that is due at this step is done now; a resume does it first."""
        self.control.should_evaluate = False
        self.control.should_save = self.control.should_training_stop = True


def norm_of(norm: Tensor | float | None) -> float | None:
    """A gradient norm as a number, of all ranks; None where the engine knows none."""
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return None if norm is None else float(norm)


def dump(folder: Path, step: int, facts: dict, record: StepRecord, rows: Sequence[dict], main: bool, rank: int) -> str:
    """Write bad_batches/step-N.json of a run: the facts and every rank's batches; all ranks call it. Returns the rows
    to name: those of batches whose loss is not finite, or else all. RunError where it cannot be written.
    """
    batches = gather_object(record.plain(rank, rows))
    path = folder / "bad_batches" / f"step-{step}.json"
    known = len(list(path.parent.glob("step-*.json"))) if path.parent.exists() else 0
    if main and known < MOST_DUMPS:
        try:
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"step": step, **facts, "batches": batches})
        except OSError as error:
            raise unwritten(path, error) from error
    broken = [batch for batch in batches if not isinstance(batch["loss"], float)] or batches
    named = [row["index"] for batch in broken for row in batch["rows"]]
    if any(index < 0 for index in named):
        return "what the draft wrote itself"
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return f"rows {named[:NAMED]}{more} of the training data"


def drop_gradients(model: nn.Module) -> None:
    """The optimizer leaves parameters without a gradient as they are, its moments and weight decay included."""
    model.zero_grad(set_to_none=True)


def plain_number(value: float | None) -> float | str | None:
    """JSON has no NaN."""
    return value if value is None or math.isfinite(value) else str(value)
