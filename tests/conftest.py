"""Fixtures that several test files use."""

import sys

import pytest

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
