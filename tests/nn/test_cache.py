"""The ragged cache: writes at per-row offsets, rolling back, growing; chunked ragged decoding equals one forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.nn.cache import RaggedCache, additive, visible
from drafttrain.target import Target
from tests.tiny_models import FAMILIES, N, V, make_model


def write(cache: RaggedCache, keys: torch.Tensor, layer=0):
    """Open a forward and write keys [B, N] (one head, one channel), values = -keys; returns what the forward sees."""
    cache.begin(keys.shape[1])
    seen, values = cache.update(keys[:, None, :, None], -keys[:, None, :, None], layer)
    assert torch.equal(values, -seen)
    return seen[:, 0, :, 0]


def committed(cache: RaggedCache, row: int) -> list[float]:
    keys, values = cache.entries(0, row)
    assert torch.equal(values, -keys)
    return keys[0, :, 0].tolist()


def test_writes_roll_back_by_length_by_hand():
    cache = RaggedCache(2, capacity=8)
    assert cache.begin(3).tolist() == [[0, 1, 2], [0, 1, 2]]
    write(cache, torch.tensor([[1.0, 2, 3], [5, 6, 9]]))
    cache.lengths = torch.tensor([3, 2])  # the second row's third token was padding
    assert cache.begin(2).tolist() == [[3, 4], [2, 3]]
    seen = write(cache, torch.tensor([[4.0, 11], [7, 8]]))
    assert cache.key_count == 5 and seen[0].tolist() == [1, 2, 3, 4, 11] and seen[1, :4].tolist() == [5, 6, 7, 8]
    cache.lengths = torch.tensor([4, 4])  # one draft refused in row 0
    assert committed(cache, 0) == [1, 2, 3, 4] and committed(cache, 1) == [5, 6, 7, 8]
    assert write(cache, torch.tensor([[10.0], [9]])).tolist() == [[1, 2, 3, 4, 10], [5, 6, 7, 8, 9]]
    assert cache.get_seq_length() == 4 and len(cache) == 1


def test_keep_picks_and_orders_rows():
    cache = RaggedCache(3, capacity=4)
    write(cache, torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    cache.lengths = torch.tensor([1, 2, 2])
    cache.keep([2, 0])
    assert cache.lengths.tolist() == [2, 1]
    assert committed(cache, 0) == [5, 6] and committed(cache, 1) == [1]


chunk = st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=3, max_size=3))


@settings(deadline=None)
@given(st.lists(chunk, min_size=1, max_size=8), st.integers(1, 6))
def test_any_sequence_of_writes_and_commits(chunks, capacity):
    """Against plain lists: what was committed stays, what was not is overwritten; growing loses nothing."""
    cache, lists, number = RaggedCache(3, capacity), [[], [], []], 0.0
    for width, accepted in chunks:
        keys = number + torch.arange(3.0 * width).reshape(3, width)
        number += 3 * width
        seen = write(cache, keys)
        for row in range(3):
            assert seen[row, : len(lists[row]) + width].tolist() == lists[row] + keys[row].tolist()
            lists[row] += keys[row, : min(accepted[row], width)].tolist()
        cache.lengths = torch.tensor([len(row) for row in lists])
    assert [committed(cache, row) for row in range(3)] == lists


def test_masks_by_hand():
    mask = visible(torch.tensor([[2, 3], [0, 1]]), 4)
    assert mask.int().tolist() == [[[[1, 1, 1, 0], [1, 1, 1, 1]]], [[[1, 0, 0, 0], [1, 1, 0, 0]]]]
    window = visible(torch.tensor([[2, 3]]), 4, window=2)
    assert window.int().tolist() == [[[[0, 1, 1, 0], [0, 0, 1, 1]]]]
    term = additive(window, torch.bfloat16)
    assert term.dtype == torch.bfloat16 and torch.equal(term == 0, window)
    assert term.min() == torch.finfo(torch.bfloat16).min


CASES = [(family, "eager") for family in FAMILIES] + [(family, "sdpa") for family in ("Llama", "Mistral", "Gemma3")]


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_ragged_chunks_equal_a_plain_forward(family, attention):
    """Prefill 3 ragged rows, then chunks with refused tails: logits, features, hs[n] and entries as in one forward."""
    target = Target.from_model(make_model(family, attn_implementation=attention))
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(3, V, (3, 24), generator=generator)
    own = target.model(input_ids=texts, output_hidden_states=True, use_cache=False)
    cache = RaggedCache(3, capacity=4)
    lengths = torch.tensor([9, 5, 7])
    prefill = target.step(texts[:, :9], cache, lengths, [1, 4], last_only=True)
    torch.testing.assert_close(prefill.logits[:, 0], own.logits[torch.arange(3), lengths - 1], rtol=1e-4, atol=1e-4)
    cache.lengths = lengths.clone()
    for accepted in ([4, 0, 2], [1, 3, 4], [0, 4, 1]):
        chunk = torch.randint(3, V, (3, 5), generator=generator)
        for row, count in enumerate(accepted):
            start = int(cache.lengths[row])
            chunk[row, : count + 1] = texts[row, start : start + count + 1]
        step = target.step(chunk, cache, None, [1, 4])
        for row, count in enumerate(accepted):
            span = slice(int(cache.lengths[row]), int(cache.lengths[row]) + count + 1)
            assert step.positions[row].tolist() == list(range(span.start, span.start + 5))
            expected = torch.cat([own.hidden_states[k][row, span] for k in (1, 4)], -1)
            torch.testing.assert_close(step.features[row, : count + 1], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(step.logits[row, : count + 1], own.logits[row, span], rtol=1e-4, atol=1e-4)
            normed = target.final_norm(step.last_hidden[row, : count + 1])
            torch.testing.assert_close(normed, own.hidden_states[N][row, span], rtol=1e-4, atol=1e-4)
        cache.lengths = cache.lengths + torch.tensor(accepted) + 1
    fresh = RaggedCache(3)
    target.step(texts, fresh)
    fresh.lengths = cache.lengths.clone()
    for layer in range(N):
        for row in range(3):
            for mine, theirs in zip(cache.entries(layer, row), fresh.entries(layer, row), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_padding_of_a_long_row_may_reach_past_the_last_position():
    """Only real tokens need positions: a row at the model's end shares a forward with one that drafts on."""
    target = Target.from_model(make_model("Llama", max_position_embeddings=8))
    texts = torch.randint(3, V, (2, 8), generator=torch.Generator().manual_seed(4))
    own = target.model(input_ids=texts, use_cache=False).logits
    cache = RaggedCache(2)
    target.step(texts[:, :7], cache, torch.tensor([7, 3]))
    cache.lengths = torch.tensor([7, 3])
    chunk = torch.cat([torch.stack([texts[0, 7:], texts[1, 3:4]]), texts[:, 4:7]], 1)
    step = target.step(chunk, cache, torch.tensor([1, 4]))
    torch.testing.assert_close(step.logits[0, 0], own[0, 7], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.logits[1], own[1, 3:7], rtol=1e-4, atol=1e-4)
