"""Which dtype a CPU multiplies fast: the measurement's rule, the notes of the verbs, and what the demo makes of it."""

import types

import pytest
import torch

from drafttrain.demo import demo_recipe
from drafttrain.evaluate import cpu_speed
from drafttrain.evaluate.cpu_speed import bf16_is_emulated, bf16_note

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32


@pytest.fixture
def emulated(monkeypatch):
    """Sets what the CPU is taken for."""
    return lambda is_so: monkeypatch.setattr(cpu_speed, "bf16_is_emulated", lambda: is_so)


@pytest.mark.parametrize(("times", "is_so"), [(0.5, False), (1.9, False), (2.1, True), (7.0, True)])
def test_bf16_is_emulated_where_products_take_twice_as_long(times, is_so, monkeypatch):
    seconds = iter([times, 1.0])
    monkeypatch.setattr(cpu_speed, "best_seconds", lambda work, repeats: (work(), next(seconds))[1])
    bf16_is_emulated.cache_clear()
    assert bf16_is_emulated() is is_so
    assert bf16_is_emulated() is is_so  # Measured once.
    bf16_is_emulated.cache_clear()


def test_this_cpu_is_judged_by_its_instructions():
    """Where PyTorch knows that there are some; Arm's it does not tell."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        pytest.skip("for CPUs with AVX2 and nothing above")
    bf16_is_emulated.cache_clear()
    assert bf16_is_emulated()


def test_notes_name_the_settings_that_mend_it(emulated):
    emulated(True)
    assert bf16_note(CPU, BF16).endswith("Mend: target.dtype=float32")
    assert bf16_note(CPU, BF16, autocast=True).endswith("Mend: target.dtype=float32 training.bf16=false")
    assert bf16_note(CPU, FP32, autocast=True).endswith("Mend: training.bf16=false")
    assert bf16_note(CPU, FP32) is None and bf16_note(torch.device("cuda"), BF16, autocast=True) is None
    emulated(False)
    assert bf16_note(CPU, BF16, autocast=True) is None


@pytest.mark.parametrize(("dtype", "bf16"), [(BF16, True), (FP32, False)])
def test_the_demo_trains_in_its_targets_dtype(dtype, bf16, tmp_path):
    recipe = demo_recipe(types.SimpleNamespace(name="a", dtype=dtype), tmp_path, 1.0)
    assert recipe.training.bf16 is bf16 and recipe.target.dtype == ("auto" if bf16 else "float32")
