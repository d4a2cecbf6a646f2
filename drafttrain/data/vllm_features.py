"""features.source vllm: hidden states that vLLM computes, into the store; what the target says about them is computed
here, from hs[n] with its own head. Rows that the store has are not asked for again.

vLLM's connector needs CUDA. Tests run on files written as it writes them (vllm_files.py); once, on a CPU with CUDA's
streams replaced, vLLM 0.32 itself filled a store of a tiny Llama, started here and as a server, to 3e-6 of the target's
own states. Unproven on a GPU: tensor parallelism, throughput, and the target's move off the GPU.
"""

import copy
import hashlib
import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.data.batching import row_name
from drafttrain.data.conversations import DataError
from drafttrain.data.features import DTYPES, FeatureSource, with_states
from drafttrain.data.files import write_json
from drafttrain.data.http_client import EngineError, Server
from drafttrain.data.server_answers import find_model
from drafttrain.data.vllm_check import Reference, compare, spread
from drafttrain.data.vllm_engines import Road, RunningServer, StartedEngine, engine_arguments, engine_python
from drafttrain.data.vllm_files import discard, read_states
from drafttrain.drafts.base import Batch
from drafttrain.recipe import Recipe, VllmConfig
from drafttrain.target import Target, TargetHead

TRIES = 3
"""So often a row is asked for whose file its writer gives up."""
ROOM = 8
"""Positions behind the longest row. The engine needs one for the token it answers, and stores nothing of a step whose
longest row leaves none for the draft."""
AHEAD = 2
"""Files in the folder at a time, as a multiple of features.vllm.concurrency."""


class VllmFeatures(FeatureSource):
    """The hidden states of rows from files of vLLM's connector, each asked for once, as far ahead as `window` rows.

    rows: index -> {"input_ids", ..}; layers: the feature layers; n: the target's; dtype: of the features; head: for the
    statistics, or None; keep: leave the files where they are.
    """

    def __init__(
        self,
        road: Road,
        rows: Sequence[dict],
        layers: Sequence[int],
        n: int,
        hidden_size: int,
        dtype: torch.dtype,
        head: TargetHead | None,
        window: int,
        keep: bool = False,
    ):
        self.road, self.rows, self.window, self.keep = road, rows, window, keep
        self.asked_layers = sorted({*layers, n})
        self.layers, self.n, self.hidden_size, self.dtype, self.head = list(layers), n, hidden_size, dtype, head
        self.expected: Sequence[int] = ()
        self._next: tuple[Sequence[int], deque[int]] = ((), deque())
        self._asked: set[int] = set()
        self._files: dict[int, Path] = {}

    @torch.no_grad()
    def attach(self, batch: Batch) -> Batch:
        device = self.head.weight.device if self.head is not None else batch.input_ids.device
        found = [self.states(index) for index in batch.index.tolist()]
        shape = (len(found), batch.input_ids.shape[1], len(self.asked_layers), self.hidden_size)
        states = torch.zeros(shape, dtype=found[0].dtype, device=device)
        for row, one in zip(states, found, strict=True):
            row[: len(one)] = one
        by_layer = {k: states[:, :, place] for place, k in enumerate(self.asked_layers)}
        return with_states(batch, [by_layer[k] for k in self.layers], by_layer[self.n], self.dtype, self.head)

    def states(self, index: int) -> Tensor:
        """hs[k] [T, A', Ht] of a row, of the feature layers and hs[n], ascending, in the engine's dtype."""
        ids = self.rows[index]["input_ids"]
        for _ in range(TRIES):
            path = self._file(index)
            found = read_states(path, ids, len(self.asked_layers), self.hidden_size, self.road.check)
            if found is not None:
                found = found.clone()  # Of the file's own pages until here.
                if not self.keep:
                    discard(path)
                return found
            discard(path)
        raise EngineError(
            f"vLLM wrote no whole file of row {index} in {TRIES} tries, the last one {path}. Expected token_ids and "
            "hidden_states. Mend: see the engine's log (a full disk?); the same command goes on"
        )

    def _file(self, index: int) -> Path:
        """The file that the engine names for a row; rows that are expected behind it are asked for meanwhile."""
        self._ask_ahead()
        if index not in self._asked:
            self._ask([index])
        while index not in self._files:
            self._files.update(self.road.answers())
            self._ask_ahead()
        self._asked.discard(index)
        return self._files.pop(index)

    def _ask_ahead(self) -> None:
        if self._next[0] is not self.expected:
            self._next = self.expected, deque(self.expected)
        ahead = self._next[1]
        if ahead and len(self._asked) <= self.window:
            self._ask([ahead.popleft() for _ in range(min(self.window, len(ahead)))])

    def _ask(self, indices: Sequence[int]) -> None:
        self._asked.update(indices)
        self.road.ask([(index, self.rows[index]["input_ids"]) for index in indices])


@contextmanager
def open_vllm(
    recipe: Recipe,
    target: Target,
    layers: Sequence[int],
    rows: Sequence[dict],
    missing: Sequence[int],
    folder: Path,
    statistics: bool,
    say: Callable[[str], None],
) -> Iterator[VllmFeatures]:
    """The source of the `missing` rows, its engine started or found and, on a few of them, checked.

    folder: the store's; an engine's files go beside it, as does vllm-check-<split>.json. Raises EngineError where the
    engine is wrong or ends, DataError where a row is too long for it.
    """
    settings = recipe.features.vllm or VllmConfig()
    asked = sorted({*layers, target.num_layers})
    longest = max((rows[index] for index in missing), key=lambda row: len(row["input_ids"]))
    references = [Reference.of(target, asked, rows[index]) for index in spread(missing, settings.check_samples)]
    own = target.head() if statistics else None
    with ExitStack() as stack:
        stack.callback(clear_files, recipe, folder)
        if settings.server is not None:
            road = stack.enter_context(_server(settings, target, asked, longest, folder))
        else:
            arguments = {"trust_remote_code": True} if recipe.target.trust_remote_code else {}
            engine = _engine(settings, target, asked, longest, folder, arguments)
            own = stack.enter_context(_lent(target, own))
            road = stack.enter_context(engine)
        source = VllmFeatures(
            road,
            rows,
            layers,
            target.num_layers,
            target.hidden_size,
            DTYPES[recipe.features.dtype],
            own,
            settings.concurrency,
            settings.keep_files,
        )
        _check(source, references, folder, say)
        yield source


def spool_bytes(recipe: Recipe, target: Target, layers: Sequence[int], lengths: Sequence[int]) -> int:
    """What the files take beside the store, at most, for rows of these lengths in tokens."""
    settings = recipe.features.vllm or VllmConfig()
    width = len({*layers, target.num_layers}) * target.hidden_size * target.dtype.itemsize
    there = sorted(lengths, reverse=True)[: None if settings.keep_files else AHEAD * settings.concurrency]
    return sum(there) * width


def _check(source: VllmFeatures, references: Sequence[Reference], folder: Path, say: Callable[[str], None]) -> None:
    """Compare the engine with the target on the references' rows, say what was found and keep it."""
    if not references:
        return
    source.expected = [reference.index for reference in references]
    found = [source.states(reference.index) for reference in references]
    facts = compare(found, references, source.asked_layers)
    shown = ", ".join(f"hs[{k}] {error:.2g}" for k, error in facts["relative_error"].items()) or "none is finite"
    say(f"vLLM: {facts['samples']} samples compared with the target here, relative error: {shown}")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder.parent / f"vllm-check-{folder.name}.json", {**facts, "engine": dict(source.road.facts)})


def clear_files(recipe: Recipe, folder: Path) -> None:
    """Remove what is left of the files on the way into the store `folder`, also of a command that was killed."""
    settings = recipe.features.vllm or VllmConfig()
    if settings.keep_files:
        return
    if settings.server is None:
        shutil.rmtree(_spool(settings, folder), ignore_errors=True)
        return
    for leftover in Path(settings.folder).glob(f"*{_tag(folder)}-*"):
        leftover.unlink(missing_ok=True)


def _tag(folder: Path) -> str:
    """Tells this store's requests and files from those of others."""
    mark = hashlib.sha256(f"{socket.gethostname()}:{folder.absolute()}".encode()).hexdigest()[:12]
    return f"drafttrain-{mark}"


def _spool(settings: VllmConfig, folder: Path) -> Path:
    return (Path(settings.folder) if settings.folder else folder.parent) / f".{_tag(folder)}"


def _check_length(longest: dict, positions: int, where: str) -> None:
    needed = len(longest["input_ids"]) + 1
    if needed > positions:
        raise DataError(
            f"{row_name(longest)} has {needed - 1} tokens, and one is answered; {where} takes {positions}. Mend: lower "
            "data.max_length, or raise what it takes"
        )


@contextmanager
def _server(
    settings: VllmConfig, target: Target, layers: Sequence[int], longest: dict, folder: Path
) -> Iterator[RunningServer]:
    server = Server(settings.server, os.environ.get("OPENAI_API_KEY"))
    model, positions = find_model(server, settings.model, target, "features.vllm")
    _check_length(longest, positions, server.url)
    shared = Path(settings.folder)
    if not shared.is_dir():
        raise EngineError(
            f"{shared} is not there. Expected the folder that the server's connector writes to (shared_storage_path), "
            "as this machine sees it. Mend: features.vllm.folder"
        )
    with RunningServer(server, model, shared, settings.concurrency, _tag(folder), layers) as road:
        yield road


@contextmanager
def _engine(
    settings: VllmConfig, target: Target, layers: Sequence[int], longest: dict, folder: Path, arguments: dict
) -> Iterator[StartedEngine]:
    python = engine_python(settings)
    positions = settings.max_model_len or min(len(longest["input_ids"]) + ROOM, target.max_positions)
    _check_length(longest, positions, "vLLM" if settings.max_model_len else target.name)
    spool = _spool(settings, folder)
    model, dtype = str(target.folder or target.name), str(target.dtype).removeprefix("torch.")
    arguments = engine_arguments(settings, model, dtype, layers, positions, spool) | arguments
    spool.mkdir(parents=True, exist_ok=True)
    with StartedEngine(python, arguments) as road:
        yield road


@contextmanager
def _lent(target: Target, head: TargetHead | None) -> Iterator[TargetHead | None]:
    """Within the block the target is off its GPU, which an engine needs, and only its head is left there, which is
    yielded. A target spread over devices stays where it is.
    """
    if target.device.type != "cuda" or target.spread:
        yield head
        return
    if head is not None:
        head = copy.copy(head)
        head.norm, head.weight = copy.deepcopy(head.norm), head.weight.clone()
        head.bias = None if head.bias is None else head.bias.clone()
    target.captured.clear()
    target.model.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield head
    finally:
        target.model.to(target.device)
