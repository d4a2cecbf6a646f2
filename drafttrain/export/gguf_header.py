"""One text from a GGUF file's header, without what gguf's reader does first: it makes an array of every entry, of each
word of the vocabulary too.
"""

import mmap
import struct
from pathlib import Path

WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the numbers by GGUF's number of their type; 8 is a string, 9 an array."""
STRING, ARRAY = 8, 9


def gguf_text(path: Path, key: str) -> str | None:
    """The string that the header of a GGUF file (version 2 or 3, little-endian) has under `key`; None where it has none
    or is no such file. Source: the format's specification in the ggml repository (docs/gguf.md).
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _find(data, key.encode())
    except (struct.error, OverflowError, KeyError, ValueError):  # Cut short, damaged, of a later version, no text.
        return None


def _find(data: mmap.mmap, key: bytes) -> str | None:
    magic, version, _, entries = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in (2, 3):
        return None
    at = 24
    for _ in range(entries):
        name, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if name == key:
            return _string(data, at + 4)[0].decode() if kind == STRING else None
        at = _behind(data, at + 4, kind)
    return None


def _string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    """What the string at `at` says, and where it ends."""
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length], at + 8 + length


def _behind(data: mmap.mmap, at: int, kind: int) -> int:
    """Where the value of this type at `at` ends."""
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind != ARRAY:
        return at + WIDTHS[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in WIDTHS:
        return at + WIDTHS[inner] * count
    for _ in range(count):
        at = _behind(data, at, inner)
    return at
