"""A file of hidden states is read whole, once its writer has let go of it, or not at all."""

import fcntl
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafttrain.data import vllm_files
from drafttrain.data.http_client import EngineError

IDS = [5, 7, 11, 13, 17]
STATES = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(vllm_files, "SETTLED", 0.05)


@pytest.fixture
def file(tmp_path) -> Path:
    """A whole file of a row, with its lock file."""
    path = tmp_path / "request.safetensors"
    save_file({"token_ids": torch.tensor(IDS), "hidden_states": STATES}, path)
    lock_of(path).touch()
    return path


def lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def read(path: Path, check=lambda: None):
    return vllm_files.read_states(path, IDS, 3, 8, check)


def test_a_file_is_read_when_its_lock_is_free_and_not_before(file) -> None:
    held, waits = lock_of(file).open("w"), 0
    fcntl.flock(held, fcntl.LOCK_EX)

    def check() -> None:
        nonlocal waits
        waits += 1
        if waits == 5:
            held.close()

    assert torch.equal(read(file, check), STATES) and waits == 5
    vllm_files.discard(file)
    assert not list(file.parent.iterdir())
    vllm_files.discard(file)


def test_a_file_without_a_lock_is_read_once_it_is_whole(file) -> None:
    lock_of(file).unlink()
    whole, pieces = file.read_bytes(), [40, 300]
    file.unlink()

    def check() -> None:
        file.write_bytes(whole[: pieces.pop(0)] if pieces else whole)

    assert torch.equal(read(file, check), STATES) and not pieces


@pytest.mark.parametrize("cut", [1, 100, None])
def test_a_file_is_given_up_when_its_lock_is_free_and_it_is_not_whole(file, cut) -> None:
    data = file.read_bytes()
    file.unlink()
    if cut is not None:
        file.write_bytes(data[:-cut])
    assert read(file) is None


def test_waiting_ends(file, monkeypatch) -> None:
    def gone() -> None:
        raise EngineError("vLLM ended")

    with lock_of(file).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match="vLLM ended"):
            read(file, gone)
        monkeypatch.setattr(vllm_files, "PATIENCE", 0.05)
        assert read(file) is None


def test_what_is_not_the_rows_is_told(file) -> None:
    with pytest.raises(
        EngineError, match=r"is of other tokens \(5: \[5, 7, 11, 13, 17\] \.\.\).*\(4: \[5, 7, 11, 13\]"
    ):
        vllm_files.read_states(file, IDS[:4], 3, 8, lambda: None)
    with pytest.raises(EngineError, match=r"holds hidden states \[5, 3, 8\]. Expected \[5, 4, 8\]"):
        vllm_files.read_states(file, IDS, 4, 8, lambda: None)
    states = STATES.clone()
    states[3, 2] = 0
    save_file({"token_ids": torch.tensor(IDS), "hidden_states": states}, file)
    with pytest.raises(EngineError, match="has positions of zeros alone"):
        read(file)
    states[3, 2, 1] = float("nan")  # For the rule of rows that are not finite.
    save_file({"token_ids": torch.tensor(IDS), "hidden_states": states}, file)
    assert read(file)[3, 2].isnan().any()
