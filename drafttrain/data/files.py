"""Whole or nothing: every file and folder is written beside its final name and renamed."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: Exception) -> bool:
    """Whether writing failed because there is no room: the disk, a quota, or the largest file allowed."""
    if isinstance(error, SafetensorError):  # "I/O error: No space left on device (os error 28)"
        return any(f"os error {number}" in str(error) for number in FULL)
    return isinstance(error, OSError) and error.errno in FULL


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file in the same folder, then rename it to `path`. On any failure nothing is left
    behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_beside(path, lambda temporary: temporary.write_text(json.dumps(value, indent=2) + "\n"))


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a new folder beside `path`, then swap it in. A failure leaves the old folder as it was."""
    new, old = recover_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new.mkdir()
    try:
        fill(new)
        _readable(new)
        for entry in (*new.rglob("*"), new):
            to_disk(entry)
        if path.exists():
            os.rename(path, old)
        os.rename(new, path)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if not path.exists() and old.exists():
            os.rename(old, path)
        shutil.rmtree(old, ignore_errors=True)


def recover_folder(path: Path) -> tuple[Path, Path]:
    """Put right what a process that was killed within `replace_folder` left; returns where it keeps the new folder and
    the old one meanwhile.
    """
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # Killed between the two renames.
        os.rename(old, path)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    return new, old


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, would outlast a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _readable(folder: Path) -> None:
    """Give every file the mode that the umask says: some libraries write for the owner alone, and an engine may run as
    another user.
    """
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)
