"""Which rows count at each unroll step, and the provenance that keeps a draft with its tokenizer."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.drafts.base import DraftError, check_provenance, supervised_rows, tokenizer_hash, write_provenance
from tests.tiny_drafts import make_target
from tests.tiny_models import make_tokenizer


def rows(mask, steps):
    return [
        [row.nonzero()[:, 0].tolist() for row in step] for step in supervised_rows(torch.tensor(mask).bool(), steps)
    ]


def test_the_first_row_of_serving_is_trained_and_nothing_past_the_turns_end():
    """A prompt 0..2, a turn 3..6: row 2, the last of the prompt, drafts x[4]; step k needs x[p+2+k] inside the turn."""
    mask = [[0, 0, 0, 1, 1, 1, 1, 0, 0]]
    assert rows(mask, 4) == [[[2, 3, 4]], [[2, 3]], [[2]], [[]]]


def test_two_turns_do_not_join_and_rows_of_a_batch_are_apart():
    mask = [[0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]]
    assert rows(mask, 2) == [[[0, 3, 4], [], [0, 1, 2, 3, 4]], [[3], [], [0, 1, 2, 3]]]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 8))
def test_supervised_rows_by_definition(mask, steps):
    expected = [
        [[p for p in range(len(mask)) if p + 2 + k < len(mask) and all(mask[p + 1 : p + 3 + k])]] for k in range(steps)
    ]
    assert rows([mask], steps) == expected


def test_tokenizer_hash_knows_every_id():
    words = make_tokenizer()
    assert tokenizer_hash(words) == tokenizer_hash(make_tokenizer())
    assert tokenizer_hash(words) != tokenizer_hash(make_tokenizer(words=89))
    swapped = make_tokenizer(specials=("<bos>", "<pad>", "<eos>", "<|im_end|>"))
    assert tokenizer_hash(words) != tokenizer_hash(swapped)


def test_provenance(tmp_path):
    target = make_target(tokenizer=make_tokenizer())
    check_provenance(tmp_path, target)  # a draft from elsewhere says nothing
    write_provenance(tmp_path, target, steps=7)
    facts = json.loads((tmp_path / "drafttrain.json").read_text())
    assert facts["steps"] == 7 and facts["target_fingerprint"] == target.fingerprint
    check_provenance(tmp_path, target)
    check_provenance(tmp_path, make_target())  # no tokenizer to compare
    other = make_target(tokenizer=make_tokenizer(words=80))
    with pytest.raises(DraftError, match=r"trained for tiny Llama with another tokenizer .* Mend"):
        check_provenance(tmp_path, other)
