"""The store on the disk: killed writers, rows that are not finite, rows that are not stored, and room for it all."""

import json
import os
import shutil
import signal
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data import store as module
from drafttrain.data.conversations import DataError
from drafttrain.data.features import FeatureSource, OnlineFeatures
from drafttrain.data.store import (
    GIB,
    HybridFeatures,
    StoredFeatures,
    StoreKey,
    check_room,
    rows_listed,
    rows_within,
    tokens_missing,
    write_store,
)
from drafttrain.drafts.base import Batch
from tests.data.test_features import LAYERS, batch_of, make_rows
from tests.tiny_drafts import make_target

KEY = StoreKey("target", (1,), "float32", "rows", statistics=False)


class Spelled(FeatureSource):
    """Features that can be told by eye: id and position, and NaN in the rows that are asked for."""

    def __init__(self, broken=(), infinite=()):
        self.broken, self.infinite, self.asked = broken, infinite, []

    def attach(self, batch: Batch) -> Batch:
        self.asked += batch.index.tolist()
        ids = batch.input_ids.float()
        last = torch.stack([ids, torch.arange(ids.shape[1]).expand_as(ids)], -1)
        for b, index in enumerate(batch.index.tolist()):
            if index in self.broken:
                last[b, int(batch.lengths[b]) - 1, 0] = float("nan")
            if index in self.infinite:
                last[b, 0, 1] = float("-inf")
        return replace(batch, features=last + 0.5, last_hidden=last)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 60)


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed(work) -> None:
    """Run `work` in a process of its own, in which it is to end by SIGKILL."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("point", ["within a shard", "in its file", "before the manifest", "between shards"])
def test_a_killed_writer_is_continued_behind_its_last_whole_shard(tmp_path, monkeypatch, point) -> None:
    rows = make_rows(23)
    write_store(tmp_path / "whole", KEY, Spelled(), rows, 40)
    whole, broken = contents(tmp_path / "whole"), tmp_path / "broken"
    third = sum(sum(shard["lengths"]) for shard in json.loads(whole["manifest.json"])["shards"][:2])
    save, write = module.save_file, module.write_json

    def half(tensors, path) -> None:
        save(tensors, path)
        if "shard-00002" in str(path):
            path.write_bytes(path.read_bytes()[:100])
            kill()

    def manifest(path, value) -> None:
        if point == "between shards":
            write(path, value)
        if len(value["shards"]) == 3:
            kill()
        write(path, value)

    def work() -> None:
        progress = (lambda tokens: kill() if tokens > third else None) if point == "within a shard" else None
        if point == "in its file":
            module.save_file = half
        elif point != "within a shard":
            module.write_json = manifest
        write_store(broken, KEY, Spelled(), rows, 40, progress)

    killed(work)
    listed = len(json.loads((broken / "manifest.json").read_text())["shards"])
    assert listed == (3 if point == "between shards" else 2)
    assert any(path.name.endswith(".tmp") for path in broken.iterdir()) == (point == "in its file")
    times = {path.name: path.stat().st_mtime_ns for path in sorted(broken.glob("shard-*"))[:listed]}
    with pytest.raises(DataError, match="not complete"):
        StoredFeatures(broken, KEY, len(rows))
    source = Spelled()
    write_store(broken, KEY, source, rows, 40)
    assert contents(broken) == whole
    assert {name: (broken / name).stat().st_mtime_ns for name in times} == times
    first = sum(shard["rows"] for shard in json.loads(whole["manifest.json"])["shards"][:listed])
    assert sorted(source.asked) == list(range(first, len(rows)))


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_shard_cut_anywhere_is_written_again_and_no_other(tmp_path, cut) -> None:
    rows = make_rows(23)
    write_store(tmp_path, KEY, Spelled(), rows, 40)
    whole, shard = contents(tmp_path), tmp_path / "shard-00001.safetensors"
    lengths = json.loads(whole["manifest.json"])["shards"][1]["lengths"]
    shard.write_bytes(whole[shard.name][:cut])
    assert tokens_missing(tmp_path, KEY, rows) == sum(lengths)
    source = Spelled()
    write_store(tmp_path, KEY, source, rows, 40)
    assert contents(tmp_path) == whole and len(source.asked) == len(lengths) < len(rows) / 2
    # A whole file of other rows in its place.
    shard.write_bytes(whole["shard-00002.safetensors"])
    write_store(tmp_path, KEY, Spelled(), rows, 40)
    assert contents(tmp_path) == whole


def test_rows_that_are_not_finite_are_listed_and_the_others_kept(tmp_path) -> None:
    rows = make_rows(23)
    write_store(tmp_path, KEY, Spelled(broken=(3, 20), infinite=(11,)), rows, 40)
    stored = StoredFeatures(tmp_path, KEY, len(rows))
    assert stored.skipped == {3, 11, 20}
    good = [row for row in rows if row["index"] not in stored.skipped]
    assert torch.equal(
        stored.attach(batch_of(good)).last_hidden, Spelled().attach(batch_of(good)).last_hidden * masked(good)
    )
    (tmp_path / "shard-00000.safetensors").unlink()
    write_store(tmp_path, KEY, Spelled(broken=(20,)), rows, 40)
    assert StoredFeatures(tmp_path, KEY, len(rows)).skipped == {11, 20}


def masked(rows: list[dict]) -> torch.Tensor:
    """1 at the tokens of the rows, 0 in the padding, [B, T, 1]."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return (torch.arange(int(lengths.max())) < lengths[:, None]).float()[..., None]


# Hybrid.


@pytest.mark.parametrize("count", [0, 9, 23])
def test_hybrid_reads_the_rows_that_are_stored_and_asks_the_target_for_the_others(tmp_path, count) -> None:
    target, rows = make_target(), make_rows(23)
    online = OnlineFeatures(target, LAYERS, torch.float32)
    key = StoreKey("target", tuple(LAYERS), "float32", "rows")
    write_store(tmp_path, key, online, rows[:count], 40)
    asked = []

    class Counted(OnlineFeatures):
        def attach(self, batch: Batch) -> Batch:
            asked.extend(batch.index.tolist())
            return super().attach(batch)

    hybrid = HybridFeatures(tmp_path, key, Counted(target, LAYERS, torch.float32))
    assert rows_listed(tmp_path, key) == count
    for chosen in ([2, 20, 5, 13], [21, 22], [1, 3], [8, 9]):
        batch = batch_of([rows[i] for i in chosen])
        expected = online.attach(batch)
        asked.clear()
        for found in (hybrid.attach(batch), hybrid.attach(hybrid.read(batch))):
            for name in key.tensors:
                torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=1e-5)
                assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert asked == [i for i in chosen if i >= count] * 2
        assert batch.last_hidden is None


def test_hybrid_goes_on_where_the_store_has_grown_and_refuses_another_store(tmp_path) -> None:
    rows, source = make_rows(23), Spelled()
    write_store(tmp_path, KEY, Spelled(), rows[:5], 40)
    write_store(tmp_path, KEY, Spelled(), rows[:14], 40)
    found = HybridFeatures(tmp_path, KEY, source).attach(batch_of(rows)).last_hidden
    expected = Spelled().attach(batch_of(rows)).last_hidden
    assert torch.equal(found * masked(rows), expected * masked(rows))
    assert source.asked == list(range(14, 23))
    with pytest.raises(DataError, match="made for another layers"):
        HybridFeatures(tmp_path, replace(KEY, layers=(2,)), source)


def test_rows_within_by_hand() -> None:
    rows = [{"input_ids": [0] * length} for length in (10, 20, 30)]
    assert [rows_within(rows, 8, size / GIB) for size in (79, 80, 239, 240, 479, 480, 1e9)] == [0, 1, 1, 2, 2, 3, 3]


# Room.


def test_big_stores_are_confirmed_and_too_big_ones_refused(tmp_path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    free = {"GiB": 200}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free["GiB"] * GIB))
    folder = tmp_path / "not" / "there"
    check_room(folder, 50 * GIB, False)
    with pytest.raises(DataError, match=r"take 50.1 GiB, 200.0 GiB are free: more than 50 GiB.*prepare --yes.*max_gib"):
        check_room(folder, int(50.1 * GIB), False)
    check_room(folder, 51 * GIB, True)
    check_room(folder, 51 * GIB, False, most_gib=60)
    free["GiB"] = 20
    check_room(folder, 10 * GIB, False)
    with pytest.raises(DataError, match="more than half of it, which is not written unasked"):
        check_room(folder, 11 * GIB, False)
    check_room(folder, 11 * GIB, True)
    with pytest.raises(DataError, match="Expected them to fit"):
        check_room(folder, 21 * GIB, True)
    assert not folder.exists()


def test_nothing_of_a_whole_store_is_asked_for_again(tmp_path) -> None:
    rows, source = make_rows(9), Spelled()
    write_store(tmp_path, KEY, source, rows, 40)
    assert tokens_missing(tmp_path, KEY, rows) == 0
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_store(tmp_path, KEY, source, rows, 40)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before and len(source.asked) == 9
    assert load_file(tmp_path / "shard-00000.safetensors").keys() == {"features", "last_hidden"}
