"""The draft vocabulary against counts by hand and by a Counter; what is stale or does not fit is refused."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from drafttrain.data.conversations import DataError
from drafttrain.data.vocab import FACTS, TENSORS, build_draft_vocab, coverage, load_vocab, save_vocab, special_ids
from drafttrain.target import Target
from tests.tiny_models import V, make_model, make_tokenizer

ROWS = [([1, 5, 5, 7, 9], [0, 1, 1, 1, 0]), ([9, 9, 9, 7, 6, 2], [0, 0, 0, 1, 1, 1])]


@pytest.fixture(scope="module")
def target():
    return Target.from_model(make_model("Llama"), make_tokenizer())


def test_counts_supervised_tokens_only():
    # Supervised: 5 twice, 7 twice, 6 and 2 once; 9 is the most frequent but only in prompts.
    vocab = build_draft_vocab(ROWS, 12, 3, [2])
    assert vocab.ids.tolist() == [2, 5, 7]
    assert (vocab.coverage, vocab.distinct) == (5 / 6, 4)


def test_fewer_distinct_tokens_than_asked_are_filled_from_the_prompts_then_with_the_lowest_ids():
    assert build_draft_vocab(ROWS, 12, 6, [2, 11]).ids.tolist() == [2, 5, 6, 7, 9, 11]
    vocab = build_draft_vocab(ROWS, 12, 8, [2, 11])
    assert vocab.ids.tolist() == [0, 1, 2, 5, 6, 7, 9, 11]
    assert vocab.coverage == 1.0


def test_ties_go_to_the_lower_id():
    assert build_draft_vocab([([8, 4, 6], [1, 1, 1])], 12, 2, []).ids.tolist() == [4, 6]


@pytest.mark.parametrize("size", [None, 12, 50])
def test_the_whole_vocabulary(size):
    vocab = build_draft_vocab(ROWS, 12, size, [2])
    assert vocab.ids.tolist() == list(range(12)) and (vocab.coverage, vocab.distinct) == (1.0, 4)


rows = st.lists(
    st.lists(st.tuples(st.integers(0, 29), st.integers(0, 1)), min_size=1).map(
        lambda row: tuple(zip(*row, strict=True))
    ),
    min_size=1,
).filter(lambda rows: any(any(mask) for _, mask in rows))


@given(rows, rows, st.integers(4, 29), st.sets(st.integers(0, 29), max_size=4))
def test_properties(train, others, size, keep):
    vocab = build_draft_vocab(iter(train), 30, size, keep)
    counts = Counter(t for ids, mask in train for t, m in zip(ids, mask, strict=True) if m)
    chosen = set(vocab.ids.tolist())
    assert vocab.ids.dtype == torch.long and len(vocab.ids) == size and bool((vocab.ids.diff() > 0).all())
    assert keep <= chosen and vocab.distinct == len(counts)
    left_out = set(range(30)) - chosen
    assert min(counts[t] for t in chosen - keep or {-1}) >= max(counts[t] for t in left_out) or chosen == keep
    assert vocab.coverage == pytest.approx(sum(counts[t] for t in chosen) / counts.total())
    assert coverage(vocab, train) == pytest.approx(vocab.coverage)
    other = [t for ids, mask in others for t, m in zip(ids, mask, strict=True) if m]
    assert coverage(vocab, others) == pytest.approx(sum(t in chosen for t in other) / len(other))


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="draft_vocab is 2, but 3 special"):
        build_draft_vocab(ROWS, 12, 2, [0, 1, 2])
    with pytest.raises(DataError, match="training data: found token id 9, expected 0 to 8"):
        build_draft_vocab([([9], [1])], 9, 4, [])
    with pytest.raises(DataError, match="kept tokens: found token id 12"):
        build_draft_vocab(ROWS, 12, 4, [12])
    with pytest.raises(DataError, match="no supervised token"):
        build_draft_vocab([([1, 2], [0, 0])], 12, 4, [])
    with pytest.raises(DataError, match="no supervised token"):
        coverage(build_draft_vocab(ROWS, 12, 4, []), [])


def test_special_ids(target):
    # <pad> <bos> <eos> <|im_end|> <unk>
    assert special_ids(target) == [0, 1, 2, 3, 4]


def test_special_ids_leave_out_reserved_slots_and_ids_without_a_row(target):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="<eos>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool>", "<image>"]})
    tool, image = tokenizer.convert_tokens_to_ids(["<tool>", "<image>"])
    sized = Target.from_model(make_model("Llama", vocab_size=image), tokenizer)
    assert special_ids(sized) == [0, 1, 2, 3, tokenizer.convert_tokens_to_ids("<unk>"), tool]
    reserved = make_tokenizer(specials=("<pad>", "<bos>", "<eos>", "<|im_end|>", *(f"<r{i}>" for i in range(1100))))
    wide = Target.from_model(make_model("Llama", vocab_size=len(reserved)), reserved)
    unk = reserved.unk_token_id
    assert special_ids(wide) == [0, 1, 2, 3, unk]


def test_save_and_load(target, tmp_path):
    vocab = build_draft_vocab(ROWS, V, 10, special_ids(target))
    save_vocab(vocab, tmp_path, target, 10)
    loaded = load_vocab(tmp_path, target, 10)
    assert torch.equal(loaded.ids, vocab.ids)
    assert (loaded.coverage, loaded.distinct) == (vocab.coverage, vocab.distinct)
    assert {path.name for path in tmp_path.iterdir()} == {TENSORS, FACTS}


def test_a_stale_vocabulary_is_refused(target, tmp_path):
    save_vocab(build_draft_vocab(ROWS, V, 10, []), tmp_path, target, 10)
    with pytest.raises(DataError, match="stale .*draft_vocab 10, now None.*--fresh"):
        load_vocab(tmp_path, target, None)
    with pytest.raises(DataError, match="stale .*tokenizer_sha256"):
        load_vocab(tmp_path, Target.from_model(make_model("Llama"), make_tokenizer(words=80)), 10)
    with pytest.raises(DataError, match="stale .*vocab_size 99, now 104"):
        load_vocab(tmp_path, Target.from_model(make_model("Llama", vocab_size=104), make_tokenizer()), 10)
    facts = tmp_path / FACTS
    kept = facts.read_text()
    facts.write_text(json.dumps({**json.loads(kept), "ids_sha256": "0"}))
    with pytest.raises(DataError, match="stale .*ids_sha256"):
        load_vocab(tmp_path, target, 10)
    facts.write_text(kept[:-20])
    with pytest.raises(DataError, match="cannot read the draft vocabulary"):
        load_vocab(tmp_path, target, 10)
    facts.write_text(kept)
    (tmp_path / TENSORS).write_bytes(b"x")
    with pytest.raises(DataError, match="cannot read the draft vocabulary"):
        load_vocab(tmp_path, target, 10)
    with pytest.raises(DataError, match="cannot read the draft vocabulary"):
        load_vocab(tmp_path / "none", target, 10)
