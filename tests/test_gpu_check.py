"""scripts/gpu_check.sh: its whole road on the CPU, and that it does not call passed what was not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from drafttrain.nn import fused_losses
from tests.load_script import load_script

ROOT = Path(__file__).parent.parent


def run(*arguments, python=sys.executable, **environment):
    command = ["bash", "scripts/gpu_check.sh", *arguments]
    environment = {**os.environ, "PYTHON": python, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(300)
def test_the_tiny_run():
    done = run("--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line.split("  ") for line in done.stdout.splitlines() if "  " in line and not line.startswith("  ")]
    status = {cells[0].strip(): next(cell.strip() for cell in cells[1:] if cell.strip()) for cells in table}
    for name in ("CUDA attention kernels", "CUDA losses", "CUDA graph replays", "8B shape"):
        assert status[name] == "not run"
    checks = ["attention, forward", "attention, backward", "losses, value", "losses, gradients", "training loss falls"]
    checks += [f"static steps, eager, {shape}" for shape in ("chain", "tree")]
    checks += [f"greedy text, draft {draft}, static steps, eager" for draft in ("none", "chain", "tree")]
    assert [status[name] for name in checks] == ["PASS"] * len(checks)
    # Figures of a tiny model on a CPU are no verdicts.
    assert status["batch 1, plain / memory bound"] == status["batch 2, eagle3 synthetic k=5, speedup / ideal"] == "-"
    assert "0 failed, 0 slow, 4 not run" in done.stdout.splitlines()[-1]


def test_a_wrong_result_ends_with_status_1(monkeypatch, capsys):
    """The loss kernel's value wrong by a tenth; the other sections are left out."""
    right = fused_losses.fused_draft_loss

    def wrong(*arguments):
        value, *rest = right(*arguments)
        return value * 1.1, *rest

    monkeypatch.setattr(fused_losses, "fused_draft_loss", wrong)
    script = load_script("gpu_check")
    for section in ("check_attention", "check_steps", "measure"):
        monkeypatch.setattr(script, section, lambda *arguments: None)
    with pytest.raises(typer.Exit) as caught:
        script.main(tiny=True)
    assert caught.value.exit_code == 1 and "2 failed" in capsys.readouterr().out.splitlines()[-1]


def test_without_a_device_or_the_package_it_says_what_is_missing(tmp_path):
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "--tiny" in done.stdout
    done = run(python=str(tmp_path / "no-python"))
    assert done.returncode == 2 and "pip install -e ." in done.stderr
