"""Whole or nothing: every file and folder is written beside its final name and renamed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file in the same folder, then rename it to `path`. On any failure nothing is left
    behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_beside(path, lambda temporary: temporary.write_text(json.dumps(value, indent=2) + "\n"))


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a new folder beside `path`, then swap it in. A failure leaves the old folder as it was."""
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # A process was killed between the two renames below.
        os.rename(old, path)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    new.mkdir()
    try:
        fill(new)
        _readable(new)
        if path.exists():
            os.rename(path, old)
        os.rename(new, path)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if not path.exists() and old.exists():
            os.rename(old, path)
        shutil.rmtree(old, ignore_errors=True)


def _readable(folder: Path) -> None:
    """Give every file the mode that the umask says: some libraries write for the owner alone, and an engine may run as
    another user.
    """
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)
