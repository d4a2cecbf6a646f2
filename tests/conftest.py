"""Fixtures that several test files use."""

import sys

import pytest
import torch

import drafttrain.cli


@pytest.fixture
def cli(monkeypatch, capfd):
    """Runs the command line in this process: (exit status, stdout, stderr)."""

    def call(*args) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["drafttrain", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            drafttrain.cli.main()
        out, err = capfd.readouterr()
        return caught.value.code or 0, out, err

    return call


@pytest.fixture(scope="module")
def gemma():
    """Gemma 3 270M in bf16; in float32 on a CPU that emulates that, where it would take several times as long."""
    from drafttrain.demo import demo_dtype, demo_target

    return demo_target(demo_dtype())


@pytest.fixture(scope="module")
def exact(gemma):
    """The same weights in fp32, where greedy identity holds token by token."""
    from drafttrain.target import load_target

    return gemma if gemma.dtype == torch.float32 else load_target(str(gemma.folder), dtype="float32")
