"""Learning rates by hand."""

import pytest

from drafttrain.training.schedule import learning_rate_factor


def factor(kind: str, step: int, progress: float, warmup: int = 4, decay: float = 0.2, least: float = 0.05) -> float:
    return learning_rate_factor(kind, step, progress, warmup, decay, least)


@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear", "constant"])
def test_warm_up_is_linear_and_the_first_step_is_not_lost(kind) -> None:
    assert [factor(kind, step, 0.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(kind, 0, 0.0, warmup=0) == 1.0


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("wsd", {0.0: 1.0, 0.5: 1.0, 0.8: 1.0, 0.9: 0.525, 1.0: 0.05}),
        ("cosine", {0.0: 1.0, 0.5: 0.525, 1.0: 0.05}),
        ("linear", {0.0: 1.0, 0.5: 0.525, 1.0: 0.05}),
        ("constant", {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}),
    ],
)
def test_the_course_after_warm_up(kind, values) -> None:
    assert {progress: factor(kind, 10, progress) for progress in values} == pytest.approx(values)


@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear"])
def test_it_never_rises_after_warm_up_and_ends_at_the_least(kind) -> None:
    values = [factor(kind, 10, i / 50) for i in range(51)]
    assert values == sorted(values, reverse=True) and values[-1] == pytest.approx(0.05)


def test_no_decay_at_all_and_decay_from_the_start() -> None:
    assert factor("wsd", 10, 1.0, decay=0.0) == 1.0
    assert factor("wsd", 10, 0.5, decay=1.0) == pytest.approx(0.525)
