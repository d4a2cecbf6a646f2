"""The files that vLLM's hidden-state connector leaves, one a request: read whole, or not at all.

Read from vLLM 0.32 (ExampleHiddenStatesConnector, extract_hidden_states): safetensors with token_ids int64 [T] and
hidden_states [T, A', Ht] of the asked hs[k], ascending, the last one un-normed, in the model's dtype. While a file is
awaited and written, its writer holds an exclusive flock on "<file>.lock".
"""

import fcntl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafttrain.data.http_client import EngineError

PATIENCE = 600.0
"""Seconds that a file may be in the writing."""
SETTLED = 5.0
"""Seconds after its lock is free until a file that is not whole is given up: its writer failed."""
TENSORS = ("token_ids", "hidden_states")


def read_states(
    path: Path, ids: Sequence[int], layers: int, hidden_size: int, check: Callable[[], None]
) -> Tensor | None:
    """hidden_states [T, A', Ht] of the row `ids`, once its file is whole; None where it was given up.

    check(): called while waiting; raises where the writer is gone. EngineError for a file of another row, of other
    layers, or with positions that were never written.
    """
    deadline, free_since = time.monotonic() + PATIENCE, None
    while True:
        held = _held(path)
        found = None if held else _load(path)
        if found is not None:
            return _checked(path, *found, ids, layers, hidden_size)
        now = time.monotonic()
        free_since = (free_since or now) if held is False else None
        if now > deadline or (free_since is not None and now - free_since > SETTLED):
            return None
        check()
        time.sleep(0.01)


def discard(path: Path) -> None:
    """Remove a request's file and its lock."""
    for file in (path, _lock(path)):
        file.unlink(missing_ok=True)


def _lock(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _held(path: Path) -> bool | None:
    """Whether the file is in the writing; None where there is no lock file."""
    try:
        with _lock(path).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return True
    return False


def _load(path: Path) -> tuple[Tensor, Tensor] | None:
    try:
        with safe_open(path, "pt") as file:  # Refuses a file that is shorter than its header says.
            names = set(file.keys())
            if names >= set(TENSORS):
                return file.get_tensor("token_ids"), file.get_tensor("hidden_states")
    except (SafetensorError, OSError):
        return None
    raise EngineError(
        f"{path} holds {', '.join(sorted(names)) or 'nothing'}. Expected token_ids and hidden_states, as vLLM 0.32's "
        "ExampleHiddenStatesConnector writes them. Mend: another release of vLLM"
    )


def _checked(path: Path, found: Tensor, states: Tensor, ids: Sequence[int], layers: int, hidden_size: int) -> Tensor:
    if found.tolist() != list(ids):
        raise EngineError(
            f"{path} is of other tokens ({len(found)}: {found[:8].tolist()} ..) than were asked for ({len(ids)}: "
            f"{list(ids[:8])} ..). Expected the row's own. Mend: an engine that alters no prompt, and a folder that "
            "no other engine writes to"
        )
    if states.shape != (len(ids), layers, hidden_size):
        raise EngineError(
            f"{path} holds hidden states {list(states.shape)}. Expected [{len(ids)}, {layers}, {hidden_size}]: tokens, "
            "layers, width. Mend: the server's eagle_aux_hidden_state_layer_ids must be the recipe's feature layers "
            "and the last one; fewer tokens come of prefix caching: --no-enable-prefix-caching"
        )
    if not states[:, -1].any(-1).all():
        raise EngineError(
            f"{path} has positions of zeros alone, which vLLM never wrote. Expected states of every token. Mend: "
            "--no-enable-prefix-caching, and a --max-model-len with room for a token more than the longest row"
        )
    return states
