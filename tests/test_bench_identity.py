"""`make bench`: scripts/bench_identity.py finds no difference to plain greedy decoding in fp32 on Gemma 3 270M."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_greedy_texts_are_identical():
    command = [sys.executable, "scripts/bench_identity.py"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert sum("32 of 32 prompts identical" in line for line in lines) == 4
    assert lines[-1] == "total: 128 of 128 texts identical to plain decoding"
