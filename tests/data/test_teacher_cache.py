"""The cached teacher holds the k likeliest words and their full-vocabulary log-probabilities, and nothing stale."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data import store
from drafttrain.data.conversations import DataError
from drafttrain.data.features import NO_MASS, OnlineFeatures
from drafttrain.data.store import StoredFeatures, StoreKey, bytes_per_token, write_store
from drafttrain.data.teacher_cache import OnlineTopK, TopKFeatures, TopKKey, likeliest, write_topk
from tests.data.test_features import batch_of, check_resuming, make_rows
from tests.tiny_drafts import make_target
from tests.tiny_models import V

K = 7
TENSORS = ("topk_ids", "topk_log_p", "target_lse", "target_argmax")


def make_key(rows: list[dict], k: int = K, **changes) -> TopKKey:
    return replace(TopKKey("target", k, str(len(rows))), **changes)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(store, "SHARD_TOKENS", 60)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere2"])
def test_the_cache_holds_the_models_own_likeliest_words(tmp_path, small_shards, family) -> None:
    target, rows = make_target(family), make_rows(12)
    key = make_key(rows)
    write_topk(tmp_path, key, target, rows, 64)
    batch = TopKFeatures(tmp_path, key, len(rows)).attach(batch_of(rows))
    assert batch.features is None and batch.last_hidden is None
    assert (batch.topk_ids.dtype, batch.topk_log_p.dtype) == (torch.int64, torch.float32)
    assert (batch.target_lse.dtype, batch.target_argmax.dtype) == (torch.float32, torch.int64)
    for b, row in enumerate(rows):
        T = len(row["input_ids"])
        with torch.no_grad():
            logits = target.model(torch.tensor([row["input_ids"]])).logits[0].double()
        full = logits.log_softmax(-1)
        falling = full.sort(-1, descending=True).values
        for p in range(batch.input_ids.shape[1]):
            if p + 1 < T and row["loss_mask"][p + 1]:  # position p holds the distribution of x[p+1]
                ids, log_p = batch.topk_ids[b, p], batch.topk_log_p[b, p].double()
                assert len(set(ids.tolist())) == K
                torch.testing.assert_close(log_p, full[p, ids], atol=1e-4, rtol=0)
                torch.testing.assert_close(log_p, falling[p, :K], atol=1e-4, rtol=0)
                tail = falling[p, K:].exp().sum()
                torch.testing.assert_close(1 - log_p.exp().sum(), tail, atol=1e-4, rtol=0)
                assert full[p, batch.target_argmax[b, p]] == pytest.approx(float(falling[p, 0]), abs=1e-4)
                assert batch.target_lse[b, p] == pytest.approx(float(logits[p].logsumexp(-1)), abs=1e-3)
            else:
                assert batch.topk_ids[b, p].eq(0).all() and batch.topk_log_p[b, p].eq(NO_MASS).all()
                assert batch.target_lse[b, p] == 0 and batch.target_argmax[b, p] == 0


def test_positions_without_a_teacher_have_no_mass_and_no_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        log_p = torch.full((3,), NO_MASS, dtype=dtype)
        assert log_p.isfinite().all() and (log_p.exp() == 0).all() and (log_p.exp() * log_p == 0).all()


def test_the_cache_gives_the_online_tensors_bit_for_bit(target, tmp_path, small_shards) -> None:
    rows = make_rows(23)
    online, key = OnlineTopK(target, K), make_key(rows)
    statistics = OnlineFeatures(target, [], torch.float32)
    write_topk(tmp_path, key, target, rows, 1)  # one row a batch, so that the kernels see the same shapes
    assert len(list(tmp_path.glob("shard-*"))) > 3
    stored = TopKFeatures(tmp_path, key, len(rows))
    for row in rows:
        a, b, c = (source.attach(batch_of([row])) for source in (online, stored, statistics))
        for name in TENSORS:
            assert getattr(a, name).dtype == getattr(b, name).dtype
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert torch.equal(b.target_lse, c.target_lse) and torch.equal(b.target_argmax, c.target_argmax)
    held = [tensor for path in tmp_path.glob("shard-*") for tensor in load_file(path).values()]
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert sum(tensor.nbytes for tensor in held) == tokens * bytes_per_token(key, target.hidden_size)
    assert bytes_per_token(key, target.hidden_size) == K * (4 + 4) + 4 + 4


@pytest.mark.parametrize("chunk", [1, 6, 256])
def test_likeliest_in_chunks_and_of_nothing(target, chunk) -> None:
    hidden = torch.randn(20, target.hidden_size, generator=torch.Generator().manual_seed(0)) * 3
    log_p = target.head()(hidden).log_softmax(-1)
    ids, values, lse, argmax = likeliest(target.head(), hidden, V, chunk)
    assert torch.equal(ids, log_p.argsort(-1, descending=True)) and torch.equal(argmax, ids[:, 0])
    torch.testing.assert_close(values, log_p.gather(-1, ids))
    torch.testing.assert_close(values.exp().sum(-1), torch.ones(20))
    shapes = [tuple(part.shape) for part in likeliest(target.head(), hidden[:0], 3, chunk)]
    assert shapes == [(0, 3), (0, 3), (0,), (0,)]


def test_more_words_than_the_vocabulary_are_refused_before_anything_is_written(target, tmp_path) -> None:
    rows, folder = make_rows(3), tmp_path / "cache"
    write_topk(tmp_path / "all", make_key(rows, V), target, rows, 64)
    with pytest.raises(DataError, match=f"features.top_k is {V + 1}, but tiny Llama has {V} words"):
        write_topk(folder, make_key(rows, V + 1), target, rows, 64)
    assert not folder.exists()


def test_an_interrupted_cache_goes_on_behind_the_last_whole_shard(target, tmp_path, small_shards) -> None:
    rows = make_rows(23)
    key = make_key(rows)
    check_resuming(
        tmp_path,
        rows,
        lambda folder, progress=None: write_topk(folder, key, target, rows, 64, progress),
        lambda folder: TopKFeatures(folder, key, len(rows)),
    )


def test_a_cache_of_something_else_is_refused(target, tmp_path) -> None:
    rows = make_rows(5)
    key = make_key(rows)
    write_topk(tmp_path, key, target, rows, 64)
    for field, value in (("target_fingerprint", "other"), ("top_k", 8), ("rows_sha256", "other")):
        wrong = replace(key, **{field: value})
        message = rf"another {field} \(found {getattr(key, field)}; expected {value}\).*Mend"
        with pytest.raises(DataError, match=message):
            TopKFeatures(tmp_path, wrong, len(rows))
        with pytest.raises(DataError, match=message):
            write_topk(tmp_path, wrong, target, rows, 64)
    with pytest.raises(DataError, match="missing or not complete"):
        TopKFeatures(tmp_path, key, len(rows) + 1)
    with pytest.raises(DataError, match="missing or not complete"):
        TopKFeatures(tmp_path / "nothing", key, len(rows))


def test_hidden_states_and_likeliest_words_are_not_taken_for_each_other(target, tmp_path) -> None:
    rows = make_rows(5)
    words, states = make_key(rows), StoreKey("target", (), "float32", str(len(rows)))
    write_topk(tmp_path / "words", words, target, rows, 64)
    write_store(tmp_path / "states", states, OnlineFeatures(target, [], torch.float32), rows, 64)
    with pytest.raises(DataError, match="another layers, dtype"):
        StoredFeatures(tmp_path / "words", states, len(rows))
    with pytest.raises(DataError, match="another top_k"):
        TopKFeatures(tmp_path / "states", words, len(rows))


def test_a_truncated_shard_is_named_and_written_again(target, tmp_path, small_shards) -> None:
    rows = make_rows(23)
    key = make_key(rows)
    write_topk(tmp_path, key, target, rows, 64)
    sound = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    stored = TopKFeatures(tmp_path, key, len(rows))
    with pytest.raises(DataError, match=r"shard-00001.safetensors is missing or damaged .*again, which writes this"):
        [stored.attach(batch_of([row])) for row in rows]
    write_topk(tmp_path, key, target, rows, 64)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == sound


def test_rows_that_the_draft_went_on_with_are_never_looked_up(target, tmp_path) -> None:
    rows = make_rows(3)
    key = make_key(rows)
    write_topk(tmp_path, key, target, rows, 64)
    with pytest.raises(AssertionError, match="went on with"):
        TopKFeatures(tmp_path, key, len(rows)).attach(batch_of([{**rows[2], "index": -1}]))
