"""The collator's labels by hand, and what every epoch of the token-budget sampler keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data.batching import Rows, TokenBudgetSampler, collate
from drafttrain.data.conversations import DataError

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=120)


def row(index: int, ids: list[int], mask: list[int]) -> dict:
    return {"index": index, "input_ids": ids, "loss_mask": mask}


def test_collate_by_hand() -> None:
    batch = collate([row(7, [11, 12, 13, 14, 15, 16], [0, 0, 1, 1, 0, 1]), row(3, [21, 22, 23, 24], [0, 1, 1, 1])])
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 0, 0]]
    assert batch["loss_mask"].tolist() == [
        [False, False, True, True, False, True],
        [False, True, True, True] + [False] * 2,
    ]
    assert batch["lengths"].tolist() == [6, 4]
    assert batch["index"].tolist() == [7, 3]
    # Row p is labelled x[p+2] iff x[p+1] and x[p+2] are supervised: the last prompt position is the first.
    assert batch["labels"].tolist() == [[-100, 14, -100, -100, -100, -100], [23, 24, -100, -100, -100, -100]]


def test_labels_do_not_wrap_around_the_end_of_a_row() -> None:
    batch = collate([row(0, [1, 2, 3], [1, 1, 1]), row(1, [4, 5], [1, 1])])
    assert batch["labels"].tolist() == [[3, -100, -100], [-100, -100, -100]]


@pytest.mark.parametrize("length", [1, 2])
def test_rows_too_short_to_train_have_no_label(length) -> None:
    assert (collate([row(0, [5] * length, [1] * length)])["labels"] == -100).all()


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 3), st.integers(1, 5), st.integers(0, 2**20))
def test_an_epoch_holds_every_row_once_within_the_budget(lengths, slack, world_size, seed) -> None:
    budget = max(lengths) * (1 + slack) + slack
    sampler = TokenBudgetSampler(lengths, budget, world_size, seed)
    counts = set()
    for epoch in (0, 1, 2, 5):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        rows = [index for batch in batches for index in batch if index >= 0]
        assert sorted(rows) == list(range(len(lengths)))
        silent = [batch for batch in batches if batch[0] < 0]
        assert len(silent) < world_size and batches[len(batches) - len(silent) :] == silent
        alone = TokenBudgetSampler(lengths, budget, 1, seed)
        alone.set_epoch(epoch)
        assert batches[: len(batches) - len(silent)] == list(alone), "the order is that of one process"
        assert all(batch and len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)
        assert len(batches) % world_size == 0 and len(batches) == len(sampler)
        counts.add(len(batches))
    assert len(counts) == 1, "the Trainer takes every epoch to be as long as the first"


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 2**20))
def test_the_order_is_fixed_by_seed_and_epoch(lengths, seed) -> None:
    first, second = (TokenBudgetSampler(lengths, 400, 1, seed) for _ in range(2))
    first.set_epoch(3)
    second.set_epoch(0)
    list(second)
    second.set_epoch(3)
    assert list(first) == list(second) == list(first)


def test_another_epoch_or_seed_is_another_order_of_other_batches() -> None:
    lengths = [10 + i % 23 for i in range(200)]
    sampler, other = TokenBudgetSampler(lengths, 128, 1, 0), TokenBudgetSampler(lengths, 128, 1, 1)
    orders = [list(other)]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert a != b
            together = {frozenset(batch) for batch in a} & {frozenset(batch) for batch in b}
            assert len(together) < len(a) / 4


def test_batches_hold_rows_of_similar_length() -> None:
    lengths = [1 + (i * 37) % 400 for i in range(2000)]
    batches = list(TokenBudgetSampler(lengths, 4096))
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded <= 1.15 * sum(lengths)
    assert len(batches) <= 1.2 * sum(lengths) / 4096 + 1


def test_processes_without_a_batch_get_the_shortest_row_in_silence() -> None:
    rows = [row(0, [7] * 5, [1] * 5), row(1, [8] * 4, [0, 1, 1, 1])]
    batches = list(TokenBudgetSampler([5, 4], 5, world_size=3))
    assert sorted(batches) == [[-2], [0], [1]] and batches[-1] == [-2]
    data = Rows(rows)
    assert len(data) == 2 and data[1] is rows[1]
    assert data[-2] == row(1, [8] * 4, [0] * 4)
    assert (collate([data[-2]])["labels"] == -100).all()


def test_a_row_over_the_budget_and_no_rows_at_all() -> None:
    with pytest.raises(DataError, match=r"row 1 has 12 tokens, training.max_tokens_per_batch is 10; raise it"):
        TokenBudgetSampler([5, 12], 10)
    with pytest.raises(DataError, match="no rows to train on"):
        TokenBudgetSampler([], 10)
