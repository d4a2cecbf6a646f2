"""Prompt lookup by hand and against a naive search over the whole text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.drafts.ngram import NgramProposer
from drafttrain.nn.sampling import Sampling
from drafttrain.target import TargetStep


def step_of(rows) -> TargetStep:
    """A right-padded step that holds these tokens; the proposer reads nothing else."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = torch.tensor(values)
    return TargetStep(tokens, tokens, lengths, torch.empty(0), None, torch.empty(0))


def begun(*texts, **options) -> NgramProposer:
    proposer = NgramProposer(**options)
    proposer.begin(step_of([t[:-1] for t in texts]), torch.tensor([t[-1] for t in texts]), Sampling(), None)
    return proposer


def drafts(proposer, *k) -> list[list[int]]:
    proposal = proposer.propose(torch.tensor(k))
    assert proposal.q is None and proposal.parents is None
    return [row[:n].tolist() for row, n in zip(proposal.tokens, proposal.lengths.tolist(), strict=True)]


def test_the_longest_match_wins_over_a_more_recent_shorter_one():
    assert drafts(begun([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]), 1) == [[7]]
    assert drafts(begun([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], max_n=2), 1) == [[8]]


def test_the_most_recent_of_equal_matches_wins():
    assert drafts(begun([1, 2, 5, 1, 2, 6, 1, 2]), 2) == [[6, 1]]


def test_min_n_max_n_and_the_limit():
    text = [4, 9, 4]
    assert drafts(begun(text), 5) == [[]]  # a match of one token is too short
    assert drafts(begun(text, min_n=1), 5) == [[9, 4]]  # no further than the text goes
    assert drafts(begun(text, min_n=1), 1) == [[9]]
    assert drafts(begun(text, min_n=1), 0) == [[]]
    assert drafts(begun([7], min_n=1), 3) == [[]]
    with pytest.raises(AssertionError):
        NgramProposer(3, 2)


def test_padding_is_no_text_and_rows_are_apart():
    proposer = begun([1, 2, 3, 1, 2], [5, 6], [1, 2])
    assert drafts(proposer, 4, 4, 4) == [[3, 1, 2], [], []]
    proposer.keep([1, 0])
    assert drafts(proposer, 4, 2) == [[], [3, 1]]


def test_advance_appends_what_was_accepted_and_the_next_token():
    proposer = begun([1, 2, 3, 4, 1, 2], [8, 9, 8, 9])
    step = step_of([[2, 3, 4, 1], [9, 8, 9]])  # the last committed token, then the drafts
    proposer.advance(step, torch.tensor([[0, 1], [-1, -1]]), torch.tensor([7, 5]))
    assert proposer._texts == [[1, 2, 3, 4, 1, 2, 3, 4, 7], [8, 9, 8, 9, 5]]
    proposer.advance(step_of([[7], [5]]), torch.tensor([[-1], [-1]]), torch.tensor([1, 8]))
    proposer.advance(step_of([[1], [8]]), torch.tensor([[-1], [-1]]), torch.tensor([2, 9]))
    assert drafts(proposer, 2, 3) == [[3, 4], [5, 8, 9]]


def naive(text, min_n, max_n, limit):
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + limit]
    return []


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 29), st.integers(1, 3), st.integers(0, 3))
def test_against_a_naive_search(text, prefilled, min_n, more):
    """Whether the text came with the prompt or token by token."""
    prefilled = min(prefilled, len(text) - 1)
    proposer = begun(text[: prefilled + 1], min_n=min_n, max_n=min_n + more)
    for end in range(prefilled + 1, len(text) + 1):
        assert drafts(proposer, 4) == [naive(text[:end], min_n, min_n + more, 4)]
        if end < len(text):
            proposer.advance(step_of([[text[end - 1]]]), torch.tensor([[-1]]), torch.tensor([text[end]]))
