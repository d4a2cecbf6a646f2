"""A run's folder: checkpoints/<recipe>/ with its recipe, prepared data, checkpoints, draft, evaluations and exports."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from drafttrain.errors import UserError
from drafttrain.recipe import Recipe, load_recipe, recipe_difference, save_recipe


class RunError(UserError):
    """A run folder that cannot be used, or a run that had to stop; says what is intact and how to go on."""


FREE_KEYS = (
    "evaluation",
    "export",
    "training.max_minutes",
    "training.max_steps",
    "training.num_train_epochs",
    "training.gradient_accumulation_steps",
    "training.on_bad_step",
    "training.spike_factor",
    "training.max_skips",
    "training.report_to",
    "features.max_gib",
    "features.vllm",
    "data.regenerate.server",
    "data.regenerate.concurrency",
    "data.regenerate.endpoint",
)
"""What may change between two commands on the same run: it alters neither the data nor the draft's shape."""


class RunFolder:
    """The paths of one run. `claim` binds it to a recipe; `lock` keeps a second process out."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe_file = path / "recipe.yaml"
        self.prepared = path / "prepared"
        self.draft = path / "draft"
        self.untrained = path / "untrained"
        self.log = path / "log.jsonl"

    @classmethod
    def find(cls, path: Path) -> "RunFolder":
        """An existing run. RunError when the folder is none."""
        run = cls(path)
        if not run.recipe_file.exists():
            raise RunError(
                f"{path} is no run folder: it has no recipe.yaml. Mend: give the folder that training wrote."
            )
        return run

    def recipe(self) -> Recipe:
        """The resolved recipe that this run was made with."""
        return load_recipe(self.recipe_file)

    def claim(self, recipe: Recipe, fresh: bool = False) -> None:
        """Write the resolved recipe into the folder, or check that it is this recipe's. RunError otherwise.

        fresh: the folder must be empty. Evaluation, export and the length of training may change between commands, all
        of training until it has begun.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file, expected a folder for the run. Mend: give another --output.")
        content = [entry.name for entry in self.path.iterdir() if entry.name != "lock"] if self.path.exists() else []
        if fresh and content:
            raise RunError(
                f"{self.path} is not empty ({', '.join(sorted(content)[:4])}), and --fresh asks for an empty folder. "
                "Mend: give another --output, or remove the folder."
            )
        if self.recipe_file.exists() and self._begun():
            free = FREE_KEYS if set(content) - {"prepared", "recipe.yaml"} else (*FREE_KEYS, "training.")
            changed = [line for line in recipe_difference(self.recipe(), recipe) if not line.strip().startswith(free)]
            if changed:
                raise RunError(
                    f"{self.path} belongs to another recipe: {'; '.join(changed[:5])}. "
                    "Mend: give another --output, or run the recipe that the folder holds."
                )
        elif content and not self.recipe_file.exists():
            raise RunError(
                f"{self.path} holds other files ({', '.join(sorted(content)[:4])}) and no recipe.yaml. "
                "Expected an empty folder or a run. Mend: give another --output."
            )
        self._check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            save_recipe(recipe, self.recipe_file)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written ({error.strerror}). Mend: give another --output.") from error

    def _begun(self) -> bool:
        """Whether the folder holds more than a recipe: one that failed at once (a path misspelt) may be mended."""
        names = {entry.name for entry in self.path.iterdir()} - {"lock", "recipe.yaml"}
        return bool(names - {"prepared"}) or (self.prepared.exists() and any(self.prepared.iterdir()))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process. RunError when another one holds it, or nothing can be written there; a
        crash releases it.
        """
        with open(self.path / "lock", "a") as handle:
            self._take(handle)
            try:
                handle.truncate(0)
                handle.write(str(os.getpid()))
                handle.flush()
            except OSError as error:
                raise self._unwritable(error) from error
            yield

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path} cannot be written ({error.strerror}). Mend: free some space, or another --output."
        )

    def _take(self, handle: IO[str]) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"{self.path} is in use by another process. Mend: wait for it, or give another --output."
            ) from error

    def _check_free(self) -> None:
        """RunError when another process holds the folder: not even its recipe may change then."""
        if (self.path / "lock").exists():
            with open(self.path / "lock") as handle:
                self._take(handle)

    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first (an unfinished one never carries this name)."""
        found = [entry for entry in self.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", entry.name)]
        return sorted(found, key=lambda entry: int(entry.name.split("-")[1]))

    def rotate(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints; renamed first, so that what a killed process has half removed
        is never taken for one.
        """
        for checkpoint in self.checkpoints()[:-keep]:
            leaving = checkpoint.with_name(f".{checkpoint.name}.old")
            checkpoint.rename(leaving)
            shutil.rmtree(leaving)
