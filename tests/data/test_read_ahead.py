"""Reading ahead changes neither order nor values, hides the time of reading, and tells its errors; what is not finite
is left out by name.
"""

import threading
import time
from dataclasses import replace

import pytest
import torch

from drafttrain.data.batching import collate
from drafttrain.data.conversations import DataError
from drafttrain.data.features import FeatureSource, finite_rows, muted
from drafttrain.data.read_ahead import MOST_BROKEN, ReadAhead, Screen
from drafttrain.drafts.base import Batch
from tests.data.test_features import batch_of, make_rows


class Slow(FeatureSource):
    """Takes `seconds` for a batch; fails at the row `fails`."""

    reads_ahead = True

    def __init__(self, seconds: float = 0.0, fails: int | None = None):
        self.seconds, self.fails, self.threads, self.read_rows = seconds, fails, set(), []

    def read(self, batch: Batch) -> Batch:
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        self.read_rows += batch.index.tolist()
        if self.fails in batch.index.tolist():
            raise DataError("shard-00007 is damaged")
        return replace(batch, last_hidden=batch.input_ids.float()[..., None])

    def attach(self, batch: Batch) -> Batch:
        return batch


class Online(FeatureSource):
    def attach(self, batch: Batch) -> Batch:
        return batch


def batches(count: int) -> list[dict]:
    rows = make_rows(2 * count)
    return [{**collate(rows[i : i + 2]), "note": i} for i in range(0, 2 * count, 2)]


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_order_and_values_are_those_without_it(depth) -> None:
    source, given = Slow(), batches(7)
    found = list(ReadAhead(lambda: source, depth).over(iter(given)))
    assert [one["note"] for one in found] == [one["note"] for one in given]
    for one, batch in zip(found, given, strict=True):
        assert torch.equal(one["last_hidden"], batch["input_ids"].float()[..., None])
        assert all(one[name] is batch[name] for name in batch)
    assert threading.current_thread().name not in source.threads and len(source.threads) == 1


def test_the_same_iterator_goes_on_and_another_begins() -> None:
    source, given = Slow(), batches(6)
    ahead, first, second = ReadAhead(lambda: source), iter(given), iter(given[:2])
    notes = [next(ahead.over(first))["note"] for _ in range(3)]
    assert notes == [0, 2, 4] and len(source.read_rows) <= 2 * (3 + ahead.depth)
    assert [one["note"] for one in ahead.over(second)] == [0, 2]
    ahead.close()
    ahead.close()
    assert not any(thread.name.startswith("features") for thread in threading.enumerate())


def test_what_reads_nothing_is_passed_through() -> None:
    given = iter(batches(1))
    assert ReadAhead(Online).over(given) is given


def test_an_error_of_the_thread_comes_where_its_batch_would() -> None:
    given = batches(6)
    source = Slow(fails=int(given[3]["index"][1]))
    reading = ReadAhead(lambda: source).over(iter(given))
    for expected in (0, 2, 4):
        assert next(reading)["note"] == expected
    with pytest.raises(DataError, match="shard-00007"):
        next(reading)
    assert not any(thread.name.startswith("features") for thread in threading.enumerate())


def test_the_wait_is_measured_and_hidden_behind_the_work() -> None:
    waits = []
    for work in (0.0, 0.03):
        source = Slow(0.01)
        ahead = ReadAhead(lambda source=source: source)
        for _ in ahead.over(iter(batches(10))):
            time.sleep(work)
        waits.append(ahead.waited)
    assert waits[0] > 0.06 and waits[1] < waits[0] / 2, waits


# What is not finite.


def with_features(rows: list[dict], broken=()) -> Batch:
    batch = batch_of(rows)
    T = batch.input_ids.shape[1]
    features = torch.ones(len(rows), T, 3)
    log_p = torch.full((len(rows), T, 2), -1.0)
    for row in broken:
        features[row, 2, 1] = float("inf")
    return replace(batch, features=features, topk_log_p=log_p, target_argmax=torch.ones(len(rows), T, dtype=torch.long))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["features", "topk_log_p", "target_lse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_rows_by_hand(name, value, dtype) -> None:
    batch = replace(with_features(make_rows(4)), target_lse=torch.zeros(4, 20))
    values = getattr(batch, name).to(dtype)
    values[2].view(-1)[-1] = value
    assert finite_rows(replace(batch, **{name: values})).tolist() == [True, True, False, True]
    values[2].view(-1)[-1] = torch.finfo(dtype).max
    assert finite_rows(replace(batch, **{name: values})).all()


def test_a_muted_row_says_nothing() -> None:
    batch = with_features(make_rows(3), broken=[1])
    quiet = muted(batch, finite_rows(batch))
    assert not quiet.loss_mask[1].any() and (quiet.labels[1] == -100).all() and (quiet.features[1] == 0).all()
    assert (quiet.topk_log_p[1] < -80).all() and (quiet.target_argmax[1] == 0).all()
    for name in ("input_ids", "loss_mask", "labels", "features", "topk_log_p", "target_argmax"):
        for row in (0, 2):
            assert torch.equal(getattr(quiet, name)[row], getattr(batch, name)[row])
    assert (quiet.input_ids[1] == 0).all()


def test_each_broken_sample_is_named_once_and_counted(capfd) -> None:
    rows = [{**row, "source": f"train.jsonl:{row['index'] + 1}"} for row in make_rows(4)]
    screen = Screen(rows)
    for _ in range(2):
        assert screen.pass_on(with_features(rows, broken=[2])).loss_mask.any(1).tolist() == [True, True, False, True]
    assert screen.pass_on(clean := with_features(rows)) is clean
    assert (screen.broken, screen.seen) == ({2}, 12)
    assert capfd.readouterr().err == "skipped train.jsonl:3: the target's features are not finite there\n"


def test_where_most_samples_are_broken_the_run_stops(capfd) -> None:
    rows = [{**row, "source": ""} for row in make_rows(MOST_BROKEN + 1)]
    screen = Screen(rows)
    screen.pass_on(with_features(rows[:-1], broken=range(MOST_BROKEN)))
    with pytest.raises(DataError, match=f"not finite in {MOST_BROKEN + 1} .*Mend: features.dtype bfloat16"):
        screen.pass_on(with_features(rows[-1:], broken=[0]))
    assert "skipped row 4:" in capfd.readouterr().err
