"""What `drafttrain check` looks at: a draft's folder as it lies on the disk, whoever wrote it, and a target's config
and tokenizer, without its weights.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafttrain.drafts.base import DraftError, read_facts
from drafttrain.drafts.eagle3_files import UNREADABLE, rope_of
from drafttrain.drafts.loading import find_draft
from drafttrain.export.base import all_finite
from drafttrain.target import EPSILONS, TargetError
from drafttrain.target_files import (
    HUB_FILES,
    STORED_DTYPES,
    TOKENIZER_FILES,
    download,
    find_folder,
    fingerprint_folder,
    read_config,
    read_header,
    read_tokenizer,
    weight_files,
)
from drafttrain.target_head import first_value

STORED_NAMES = {torch.float64: "F64", **{dtype: name for name, dtype in STORED_DTYPES.items()}}
STORED_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
STORED_NAMES |= {torch.bool: "BOOL"}
FLOATS = {name: str(t).removeprefix("torch.") for t, name in STORED_NAMES.items() if t.is_floating_point}
PICKLED = ("*.bin", "*.pt")
OPTIMIZER = ("optimizer", "scheduler", "training_args", "rng_state")
"""Beginnings of pickled files that hold no weights."""


class Header(NamedTuple):
    """Of a stored tensor: its shape, and its dtype as safetensors call it (BF16, I64, ..)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Finding:
    """One thing that was found. code: a row of check_engines.TABLE; mend: what to do; engines: those that it concerns,
    None: those that the row names.
    """

    code: str
    found: str
    mend: str
    engines: tuple[str, ...] | None = None


class StoredDraft:
    """A draft's folder: `config`, `facts` (drafttrain.json), `headers` by tensor name; numbers are read one tensor at a
    time. DraftError where the folder holds no draft or a file is broken.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_facts(folder / "config.json")
        facts = folder / "drafttrain.json"
        self.facts: dict[str, Any] = read_facts(facts) if facts.exists() else {}
        self.files = _weight_files(folder)
        self.headers: dict[str, Header] = {}
        self._home: dict[str, Path] = {}
        self._pickled: dict[str, Tensor] = {}
        for path in self.files:
            for name, header in self._read(path):
                self.headers[name], self._home[name] = header, path

    @classmethod
    def open(cls, name_or_path: str | Path) -> "StoredDraft":
        """A draft or run folder, or a hub id, of which pickled weights are fetched too."""
        path = Path(name_or_path)
        if not path.exists() and str(name_or_path).count("/") == 1 and not str(name_or_path).startswith((".", "~")):
            try:
                return cls(download(str(name_or_path), None, [*HUB_FILES, *PICKLED]))
            except TargetError as error:
                raise DraftError(f"no draft: {error}") from error
        return cls(find_draft(name_or_path))

    def _read(self, path: Path) -> Iterator[tuple[str, Header]]:
        try:
            if path.suffix == ".safetensors":
                for name, entry in json.loads(read_header(path)[0]).items():
                    if name != "__metadata__":
                        yield name, Header(tuple(entry["shape"]), entry["dtype"])
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self._pickled |= tensors
                for name, tensor in tensors.items():
                    yield name, Header(tuple(tensor.shape), STORED_NAMES.get(tensor.dtype, str(tensor.dtype)))
        except (*UNREADABLE, AttributeError, KeyError, TypeError) as error:
            raise DraftError(f"{path} cannot be read ({error}). Mend: export or download the draft again.") from error

    def tensor(self, name: str) -> Tensor:
        """One tensor, read from its file. DraftError where that ends too early."""
        if name in self._pickled:
            return self._pickled[name]
        path = self._home[name]
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise DraftError(f"{path} cannot be read ({error}). Mend: export or download the draft again.") from error

    @cached_property
    def unsound(self) -> tuple[list[str], list[str]]:
        """Names of floating tensors with numbers that are not finite, and of those that are zero throughout. One pass,
        one tensor in memory at a time.
        """
        broken, zero = [], []
        for name, header in self.headers.items():
            if header.dtype not in FLOATS:
                continue
            tensor = self.tensor(name)
            if not all_finite(tensor):
                broken.append(name)
            elif tensor.numel() and not bool(tensor.any()):
                zero.append(name)
        return broken, zero

    @property
    def float_dtypes(self) -> dict[str, list[str]]:
        """Names by floating dtype (float32, bfloat16, ..), of the tensors that engines read as weights."""
        out: dict[str, list[str]] = {}
        for name, header in self.headers.items():
            if header.dtype in FLOATS:
                out.setdefault(FLOATS[header.dtype], []).append(name)
        return out


def _weight_files(folder: Path) -> list[Path]:
    """As engines find them: safetensors (by the index where there is one), else pickled ones."""
    try:
        named = weight_files(folder)
    except TargetError as error:
        raise DraftError(str(error)) from error
    missing = [path.name for path in named if not path.is_file()]
    if missing:
        raise DraftError(f"{folder} lacks {missing[0]}, which its index names. Mend: finish the download.")
    paths = named or sorted(folder.glob("*.safetensors"))
    for pattern in PICKLED:
        paths = paths or [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(OPTIMIZER)]
    if not paths:
        raise DraftError(
            f"{folder} has no weights. Expected model.safetensors or pytorch_model.bin. Mend: finish the download, or "
            "export again."
        )
    return paths


@dataclass
class StoredView:
    """A stored draft beside its target, its tensors under the engines' names."""

    draft: StoredDraft
    target: "TargetFacts"

    @cached_property
    def names(self) -> dict[str, str]:
        """Engines' name -> stored name."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.draft.headers[self.names[name]].shape if name in self.names else None

    def tensor(self, name: str) -> Tensor:
        return self.draft.tensor(self.names[name])


@dataclass(frozen=True)
class TargetFacts:
    """What a check needs of a target: from its config, tokenizer and, where they lie on the disk, weight files' heads.

    vocab_size is the config's, padding included; rope_scaling None: plain RoPE; dtype: float32, bfloat16, .. or None;
    fingerprint None: no weights at hand.
    """

    name: str
    folder: Path
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    eps: float
    rope_theta: float | None
    rope_scaling: dict | None
    architectures: list[str]
    sliding: bool
    dtype: str | None
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: str | None

    @classmethod
    def read(cls, name_or_path: str) -> "TargetFacts":
        """Of a folder, a hub id (weights are not downloaded) or a .gguf file. TargetError where it cannot be read."""
        folder = find_folder(name_or_path, None, None, False, weights=False)
        whole = read_config(str(folder), False)
        values = whole.get_text_config(decoder=True).to_dict()
        theta, scaling = rope_of(values)
        dtype = whole.get_text_config(decoder=True).dtype or whole.dtype
        weights = weight_files(folder)
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES[:3])
        return cls(
            name=name_or_path,
            folder=folder,
            model_type=values["model_type"],
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            vocab_size=values["vocab_size"],
            max_positions=values["max_position_embeddings"],
            eps=first_value(values, EPSILONS, "the epsilon of its norms"),
            rope_theta=theta,
            rope_scaling=scaling,
            architectures=whole.architectures or [],
            sliding=bool(values.get("sliding_window")),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            tokenizer=read_tokenizer(str(folder), False) if has_tokenizer else None,
            fingerprint=fingerprint_folder(folder) if weights and all(p.is_file() for p in weights) else None,
        )

    def table(self, ending: str) -> Tensor | None:
        """The one tensor whose name ends so, of the weight files, where they lie on the disk; else None."""
        if self.fingerprint is None:
            return None
        for path in weight_files(self.folder):
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.endswith(ending)]  # noqa: SIM118
                if len(names) == 1:
                    return file.get_tensor(names[0])
        return None

    def head(self) -> Tensor | None:
        """The vocabulary matrix [V, Ht], the embedding table where they are one, or None without weights."""
        own = self.table("lm_head.weight")
        return self.table("embed_tokens.weight") if own is None else own
