"""Features online and from the store are the same bits, belong to their position, and nothing stale is read."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data import store
from drafttrain.data.batching import collate
from drafttrain.data.conversations import DataError
from drafttrain.data.features import DTYPES, OnlineFeatures, channel_statistics, teacher_statistics
from drafttrain.data.store import StoredFeatures, StoreKey, bytes_per_token, tokens_missing, write_store
from drafttrain.drafts.base import Batch
from tests.tiny_drafts import make_target
from tests.tiny_models import V

LAYERS = [2, 4, 5]
TENSORS = ("features", "last_hidden", "target_lse", "target_argmax")


class Interrupted(Exception):
    """What the test raises in the middle of writing."""


def make_rows(count: int, seed: int = 0, shortest: int = 4, longest: int = 20) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        length = rng.randrange(shortest, longest)
        ids = [1, *(rng.randrange(5, V) for _ in range(length - 1))]
        prompt = rng.randrange(1, length - 1)
        rows.append({"index": index, "input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt)})
    return rows


def make_key(rows: list[dict], dtype: str = "float32", **changes) -> StoreKey:
    return replace(StoreKey("target", tuple(LAYERS), dtype, str(len(rows))), **changes)


def batch_of(rows: list[dict]) -> Batch:
    return Batch(**collate(rows))


def check_resuming(tmp_path: Path, rows: list[dict], write, read) -> None:
    """write(folder, progress), stopped in the middle and called again, leaves the files of one that was not stopped."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write(whole)
    total = sum(len(row["input_ids"]) for row in rows)
    calls = []

    def stop(tokens: int) -> None:
        if tokens > total / 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        write(broken, stop)
    done = {path.name: path.stat().st_mtime_ns for path in broken.glob("shard-*")}
    assert 1 <= len(done) < len(list(whole.glob("shard-*")))
    with pytest.raises(DataError, match="not complete"):
        read(broken)
    write(broken, calls.append)
    assert {name: (broken / name).stat().st_mtime_ns for name in done} == done
    assert calls[0] > sum(load_file(broken / name)["target_lse"].numel() for name in done) and calls[-1] == total
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (whole, broken)]
    assert contents[0] == contents[1]
    read(broken)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(store, "SHARD_TOKENS", 60)


def test_online_tensors_equal_the_models_own(target) -> None:
    rows = make_rows(5)
    batch = OnlineFeatures(target, LAYERS, torch.float32).attach(batch_of(rows))
    for b, row in enumerate(rows):
        ids, T = torch.tensor([row["input_ids"]]), len(row["input_ids"])
        with torch.no_grad():
            output = target.model(ids, output_hidden_states=True)
        expected = torch.cat([output.hidden_states[k][0] for k in LAYERS], -1)
        torch.testing.assert_close(batch.features[b, :T], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            target.final_norm(batch.last_hidden[b, :T]), output.hidden_states[-1][0], atol=1e-4, rtol=1e-4
        )
        for p in range(T - 1):
            if row["loss_mask"][p + 1]:  # position p holds the distribution of x[p+1]
                logits = output.logits[0, p]
                assert batch.target_lse[b, p] == pytest.approx(float(logits.logsumexp(-1)), abs=1e-3)
                assert batch.target_argmax[b, p] == logits.argmax()
            else:
                assert batch.target_lse[b, p] == 0
        assert batch.target_lse[b, T - 1 :].count_nonzero() == 0
    assert batch.features.requires_grad is False and not batch.features.is_inference()


def test_right_padding_does_not_change_a_row(target) -> None:
    rows = make_rows(6)
    source = OnlineFeatures(target, LAYERS, torch.float32)
    together = source.attach(batch_of(rows))
    for b, row in enumerate(rows):
        alone, T = source.attach(batch_of([row])), len(row["input_ids"])
        for name in TENSORS:
            torch.testing.assert_close(getattr(together, name)[b, :T], getattr(alone, name)[0], atol=1e-4, rtol=1e-4)
        assert together.features[b, T:].count_nonzero() == 0


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_teacher_statistics_are_those_of_the_full_vocabulary(target, chunk) -> None:
    hidden = torch.randn(20, target.hidden_size, generator=torch.Generator().manual_seed(0)) * 3
    logits = target.head()(hidden)
    lse, argmax = teacher_statistics(target.head(), hidden, chunk)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    assert torch.equal(argmax, logits.argmax(-1)) and lse.dtype == torch.float32
    lse, argmax = teacher_statistics(target.head(), hidden[:0])
    assert (lse.shape, argmax.shape, argmax.dtype) == ((0,), (0,), torch.int64)


@pytest.mark.parametrize("statistics", [True, False])
def test_without_layers_or_statistics_the_rest_is_the_same(target, statistics) -> None:
    rows = make_rows(4)
    full = OnlineFeatures(target, LAYERS, torch.float32).attach(batch_of(rows))
    batch = OnlineFeatures(target, [], torch.float32, statistics).attach(batch_of(rows))
    assert batch.features is None and torch.equal(batch.last_hidden, full.last_hidden)
    if statistics:
        assert torch.equal(batch.target_lse, full.target_lse) and torch.equal(batch.target_argmax, full.target_argmax)
    else:
        assert batch.target_lse is None and batch.target_argmax is None


@pytest.mark.parametrize(
    ("dtype", "layers", "statistics"),
    [
        ("bfloat16", LAYERS, True),
        ("float32", LAYERS, True),
        ("bfloat16", [], False),
        ("float32", [], True),
        ("float32", LAYERS, False),
    ],
)
def test_the_store_gives_the_online_tensors_bit_for_bit(
    target, tmp_path, small_shards, dtype, layers, statistics
) -> None:
    rows = make_rows(23)
    online = OnlineFeatures(target, layers, DTYPES[dtype], statistics)
    key = make_key(rows, dtype, layers=tuple(layers), statistics=statistics)
    write_store(tmp_path, key, online, rows, 1)  # one row a batch, so that the kernels see the same shapes
    assert len(list(tmp_path.glob("shard-*"))) > 3
    stored = StoredFeatures(tmp_path, key, len(rows))
    for row in rows:
        a, b = online.attach(batch_of([row])), stored.attach(batch_of([row]))
        for name in set(TENSORS) - set(key.tensors):
            assert getattr(a, name) is None and getattr(b, name) is None
        for name in key.tensors:
            assert getattr(a, name).dtype == getattr(b, name).dtype
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    chosen = [rows[i] for i in (17, 3, 22, 9)]
    batch = stored.attach(batch_of(chosen))
    for b, row in enumerate(chosen):
        single, T = stored.attach(batch_of([row])), len(row["input_ids"])
        for name in key.tensors:
            assert torch.equal(getattr(batch, name)[b, :T], getattr(single, name)[0])
            assert getattr(batch, name)[b, T:].count_nonzero() == 0
    held = [tensor for path in tmp_path.glob("shard-*") for tensor in load_file(path).values()]
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert sum(tensor.nbytes for tensor in held) == tokens * bytes_per_token(key, target.hidden_size)


def test_bytes_a_token_by_hand() -> None:
    rows = make_rows(1)
    assert bytes_per_token(make_key(rows, "bfloat16"), 640) == 4 * 640 * 2 + 8
    assert bytes_per_token(make_key(rows, "bfloat16", layers=(), statistics=False), 640) == 2 * 640
    assert bytes_per_token(make_key(rows, "float32", layers=()), 640) == 4 * 640 + 8


def test_manifests_from_before_statistics_could_be_left_out_are_read(target, tmp_path) -> None:
    rows = make_rows(5)
    online, key = OnlineFeatures(target, LAYERS, torch.float32), make_key(rows)
    write_store(tmp_path, key, online, rows, 64)
    new = StoredFeatures(tmp_path, key, len(rows)).attach(batch_of(rows))
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["key"].pop("statistics") is True
    path.write_text(json.dumps(manifest))
    write_store(tmp_path, key, online, rows, 64)  # Nothing left to do.
    assert json.loads(path.read_text()) == manifest
    old = StoredFeatures(tmp_path, key, len(rows)).attach(batch_of(rows))
    for name in TENSORS:
        assert torch.equal(getattr(old, name), getattr(new, name))
    bare = StoredFeatures(tmp_path, replace(key, statistics=False), len(rows)).attach(batch_of(rows))
    assert torch.equal(bare.features, new.features) and bare.target_lse is None and bare.target_argmax is None


def test_a_store_continued_without_statistics_is_one_without_them(target, tmp_path, small_shards) -> None:
    rows = make_rows(23)
    online, key = OnlineFeatures(target, [], torch.float32), make_key(rows, layers=())
    write_store(tmp_path, key, online, rows, 1)
    (tmp_path / "shard-00002.safetensors").unlink()
    bare_key = replace(key, statistics=False)
    write_store(tmp_path, bare_key, OnlineFeatures(target, [], torch.float32, False), rows, 1)
    stored = StoredFeatures(tmp_path, bare_key, len(rows))
    for row in rows:
        expected = online.attach(batch_of([row])).last_hidden
        assert torch.equal(stored.attach(batch_of([row])).last_hidden, expected)
    with pytest.raises(DataError, match=r"made for another statistics \(found False; expected True\)"):
        StoredFeatures(tmp_path, key, len(rows))


def test_an_interrupted_store_goes_on_behind_the_last_whole_shard(target, tmp_path, small_shards) -> None:
    rows = make_rows(23)
    online, key = OnlineFeatures(target, LAYERS, torch.float32), make_key(rows)
    check_resuming(
        tmp_path,
        rows,
        lambda folder, progress=None: write_store(folder, key, online, rows, 64, progress),
        lambda folder: StoredFeatures(folder, key, len(rows)),
    )


def test_a_store_of_something_else_is_refused(target, tmp_path) -> None:
    rows = make_rows(5)
    online, key = OnlineFeatures(target, LAYERS, torch.float32), make_key(rows)
    write_store(tmp_path, key, online, rows, 64)
    for field, value in (
        ("target_fingerprint", "other"),
        ("layers", (1, 4, 5)),
        ("dtype", "bfloat16"),
        ("rows_sha256", "other"),
    ):
        wrong = replace(key, **{field: value})
        with pytest.raises(DataError, match=f"made for another {field}"):
            StoredFeatures(tmp_path, wrong, len(rows))
        with pytest.raises(DataError, match=f"made for another {field}"):
            write_store(tmp_path, wrong, online, rows, 64)
    with pytest.raises(DataError, match="missing or not complete"):
        StoredFeatures(tmp_path, key, len(rows) + 1)
    with pytest.raises(DataError, match="missing or not complete"):
        StoredFeatures(tmp_path / "nothing", key, len(rows))


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_shard_is_named_and_written_again(target, tmp_path, small_shards, damage) -> None:
    rows = make_rows(23)
    online, key = OnlineFeatures(target, LAYERS, torch.float32), make_key(rows)
    write_store(tmp_path, key, online, rows, 64)
    sound = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shard = tmp_path / "shard-00001.safetensors"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        shard.unlink()
    stored = StoredFeatures(tmp_path, key, len(rows))
    with pytest.raises(DataError, match=r"shard-00001.safetensors is missing or damaged .*again, which writes this"):
        [stored.attach(batch_of([row])) for row in rows]
    others = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*") if path != shard}
    assert tokens_missing(tmp_path, key, rows) == sum(json.loads(sound["manifest.json"])["shards"][1]["lengths"])
    write_store(tmp_path, key, online, rows, 64)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == sound
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in others} == others and len(others) > 2
    assert tokens_missing(tmp_path, key, rows) == 0


def test_channel_rms_by_hand(target) -> None:
    rows = make_rows(4)
    found = channel_statistics(OnlineFeatures(target, LAYERS, torch.float32), target, rows)
    values, normed = [], []
    for row in rows:
        with torch.no_grad():
            states = target.model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        values.append(torch.cat([states[k][0] for k in LAYERS], -1)[1:])  # position 0, the BOS, is left out
        normed.append(states[-1][0, 1:])
    for name, parts in (("feature_rms", values), ("final_rms", normed)):
        torch.testing.assert_close(found[name], torch.cat(parts).square().mean(0).sqrt(), atol=1e-4, rtol=1e-4)
    kept = torch.cat([value.square() for value in values]).mean(0).sqrt()
    assert math.isclose(float(found["feature_rms"].norm()), float(kept.norm()), rel_tol=1e-4)


def test_channel_rms_from_the_store_and_of_nothing(target, tmp_path) -> None:
    rows = make_rows(6)
    online, key = OnlineFeatures(target, LAYERS, torch.float32), make_key(rows)
    write_store(tmp_path, key, online, rows, 64)
    stored = StoredFeatures(tmp_path, key, len(rows))
    a, b = (channel_statistics(source, target, rows) for source in (online, stored))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    part = channel_statistics(online, target, rows, max_tokens=10)
    assert not torch.equal(part["feature_rms"], a["feature_rms"])
    with pytest.raises(DataError, match="every row has a single token"):
        channel_statistics(online, target, [{"index": 0, "input_ids": [1], "loss_mask": [0]}])
