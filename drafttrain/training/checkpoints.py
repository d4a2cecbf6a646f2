"""Whole-or-nothing checkpoints of the trainer: written beside their final name, listed with their hashes, renamed when
they are on the disk, rotated; and the last whole one for a resume.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafttrain.data.files import recover_folder, to_disk
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.recipe import TrainingConfig
from drafttrain.training.distributed import DistributedTrainer

LISTING = "checkpoint.json"
"""Of each checkpoint: {"files": {path: {"bytes", "sha256"}}}."""


class CheckpointingTrainer(DistributedTrainer):
    """Trainer whose checkpoints hold what the draft trains (trained_state), whole or not at all."""

    run: RunFolder
    config: TrainingConfig

    def _save(self, output_dir=None, state_dict=None) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        self.model.load_trained_state(load_file(Path(resume_from_checkpoint) / "model.safetensors"))

    def _get_output_dir(self, trial) -> str:
        return str(self.run.path / ".saving")

    def _save_checkpoint(self, model, trial) -> None:
        """Written in a folder of its own and renamed when whole; a failure on any rank keeps the last checkpoint, and
        all ranks say so.
        """
        name = f"checkpoint-{self.state.global_step}"
        write = super()._save_checkpoint
        try:
            for part in (self._clear, partial(write, model, trial), partial(self._publish, name)):
                error = _failure(part)
                if self.on_any_rank(error is not None):
                    intact = self.run.checkpoints()
                    kept = f"{intact[-1].name} is intact" if intact else "there is no earlier checkpoint"
                    raise RunError(
                        f"{name} could not be saved ({error or 'another process failed'}); {kept}. Mend: free some "
                        "space, then run the same command to resume."
                    ) from error
        finally:
            self._clear()

    def _clear(self) -> None:
        if self.args.should_save:
            shutil.rmtree(self._get_output_dir(None), ignore_errors=True)

    def _publish(self, name: str) -> None:
        """When every rank has written its part: list it, bring it to the disk, give it its name, drop older ones."""
        if not self.args.should_save:
            return
        written, final = Path(self._get_output_dir(None)) / name, self.run.path / name
        list_files(written)
        if final.exists():
            final.rename(written.with_name("replaced"))
        written.rename(final)
        to_disk(self.run.path)
        self.run.rotate(self.config.save_total_limit)

    def on_any_rank(self, here: bool) -> bool:
        """Whether something is so on any rank; every rank must ask."""
        if self.accelerator.num_processes == 1:
            return here
        return bool(self.accelerator.gather(torch.tensor([int(here)], device=self.args.device)).any())


def _failure(part: Callable[[], None]) -> Exception | None:
    try:
        part()
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch.save on a full disk.
        return error
    return None


def list_files(folder: Path) -> None:
    """Write checkpoint.json, size and sha256 of each file in a folder, and bring all of it to the disk."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != LISTING)
    found = {str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in files}
    listing = folder / LISTING
    listing.write_text(json.dumps({"files": found}, indent=2) + "\n")
    for entry in (*files, listing, *(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        to_disk(entry)


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its listing; None: it is whole. One without a listing was written by an
    earlier version and is taken as it is.
    """
    listing = checkpoint / LISTING
    if not listing.exists():
        return None
    try:
        files = json.loads(listing.read_text())["files"]
        for name, expected in files.items():
            file = checkpoint / name
            if not file.exists():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}"
            if _digest(file) != expected["sha256"]:
                return f"{name} is not what was written (sha256)"
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error})"
    return None


def settle(run: RunFolder, say: Callable[[str], None]) -> Path | None:
    """Before a resume, by one process: remove what a killed one left unfinished, and return the last whole checkpoint.

    Newer ones that are damaged are kept aside as checkpoint-N.broken, and that is said. None: there is no whole one.
    """
    recover_folder(run.draft)
    recover_folder(run.untrained)
    for leftover in (run.path / ".saving", *run.path.glob(".checkpoint-*.old")):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in run.path.glob(".*.tmp"):
        leftover.unlink()
    broken = []
    for checkpoint in reversed(run.checkpoints()):
        found = fault(checkpoint)
        if found is None:
            break
        aside = checkpoint.with_name(f"{checkpoint.name}.broken")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        broken.append(f"{checkpoint.name} is damaged: {found}; kept as {aside.name}")
    whole = run.checkpoints()[-1] if run.checkpoints() else None
    for line in broken:
        say(f"{line}, training goes on from {whole.name if whole else 'the start'}")
    return whole


def _digest(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
