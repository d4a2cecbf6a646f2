"""Rollback: in every iteration the target's and the draft's cache equal a fresh prefill of the emitted tokens."""

import pytest
import torch

from drafttrain.drafts.ngram import NgramProposer
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree, StaticTree
from drafttrain.specdec import decode
from drafttrain.specdec.decode import generate
from tests.tiny_drafts import Oracle, SelfProposer, agreeable_draft, features_of, make_target, plain
from tests.tiny_models import tokens

RAGGED = [tokens(1, 6)[0].tolist(), tokens(1, 11)[0].tolist(), tokens(1, 2)[0].tolist()]
STATIC = StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])
DRAWN = Sampling(temperature=1.0, draft_mode="probabilistic", seed=5)


@pytest.fixture(scope="module")
def target():
    return make_target()


class RecordedCache(RaggedCache):
    """The loop's cache, remembering which request each row holds."""

    made: list["RecordedCache"] = []

    def __init__(self, batch, capacity):
        super().__init__(batch, capacity)
        self.requests = list(range(batch))
        self.made.append(self)

    def keep(self, rows):
        super().keep(rows)
        self.requests = [self.requests[row] for row in rows]


def entries_in_every_iteration(target, proposer, caches, monkeypatch, **options):
    """[(request, cache number, layer, keys and values)] as committed before each target forward, and the texts."""
    monkeypatch.setattr(decode, "RaggedCache", RecordedCache)
    monkeypatch.setattr(RecordedCache, "made", [])
    seen = []

    def observe(step):
        recorded = RecordedCache.made[0]
        for number, cache in enumerate([recorded, *caches()]):
            for row, request in enumerate(recorded.requests):
                for layer in range(len(cache)):
                    if recorded.lengths[row]:
                        seen.append((request, number, layer, *(part.clone() for part in cache.entries(layer, row))))

    done = generate(target, RAGGED, proposer, observe=observe, **options)
    return seen, [prompt + g.tokens for prompt, g in zip(RAGGED, done.generations, strict=True)]


def check_entries(seen, texts, fresh_caches):
    """Every recorded entry equals the same positions of a cache freshly filled with the emitted text."""
    fresh = [fresh_caches(torch.tensor([text])) for text in texts]
    for request, number, layer, keys, values in seen:
        expected = fresh[request][number].entries(layer, 0)
        length = keys.shape[1]
        assert expected[0].shape[1] >= length
        torch.testing.assert_close(keys, expected[0][:, :length], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, expected[1][:, :length], rtol=1e-4, atol=1e-4)


def filled_target_cache(target, ids):
    cache = RaggedCache(1)
    target.step(ids, cache)
    cache.lengths += ids.shape[1]
    return cache


def filled_draft_cache(target, draft, ids):
    """The proposer begun on a whole text but its last token, with features of one plain forward."""
    proposer = draft.proposer(target)
    step = target.step(ids[:, :-1], RaggedCache(1))
    step.features = features_of(target, ids[:, :-1], draft.feature_layers)
    proposer.begin(step, ids[:, -1], Sampling(), None)
    return proposer._cache


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "probabilistic"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_the_targets_cache_holds_the_emitted_tokens_and_nothing_else(family, sampling, monkeypatch):
    target = make_target(family)
    proposers = [SelfProposer(target)]
    if sampling.greedy:
        texts = plain(target, RAGGED, 40)
        proposers += [Oracle(texts, [0, 2, 1, 4]), Oracle(texts, 0), NgramProposer(1, 2)]
    for proposer in proposers:
        seen, texts = entries_in_every_iteration(
            target, proposer, list, monkeypatch, k=4, sampling=sampling, max_new_tokens=16, stop_ids=()
        )
        assert len(seen) >= 8 * 3 * 3
        check_entries(seen, texts, lambda ids: [filled_target_cache(target, ids)])


def draft_cache_run(target, draft, proposer, sampling, monkeypatch):
    seen, texts = entries_in_every_iteration(
        target, proposer, lambda: [proposer._cache] if proposer._cache is not None else [], monkeypatch,
        k=4, sampling=sampling, max_new_tokens=16, stop_ids=(),
    )  # fmt: skip
    assert sum(number == 1 for _, number, *_ in seen) >= 15
    check_entries(seen, texts, lambda ids: [filled_target_cache(target, ids), filled_draft_cache(target, draft, ids)])


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "probabilistic"])
def test_the_drafts_cache_holds_the_targets_features_of_the_emitted_tokens(target, sampling, monkeypatch):
    draft = agreeable_draft(target)
    draft_cache_run(target, draft, draft.proposer(target), sampling, monkeypatch)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize(
    ("tree", "sampling"), [(DynamicTree(4, 12), Sampling()), (STATIC, Sampling()), (STATIC, DRAWN)], ids=str
)
def test_both_caches_after_tree_rounds(family, tree, sampling, monkeypatch):
    target = make_target(family)
    draft = agreeable_draft(target)
    draft_cache_run(target, draft, draft.proposer(target, tree), sampling, monkeypatch)


def test_a_draft_cache_fed_one_position_off_is_caught(target, monkeypatch):
    draft = agreeable_draft(target)
    proposer = draft.proposer(target)
    advance = proposer.advance

    def off_by_one(step, path, next_token):
        step.features = step.features.roll(1, 1)
        advance(step, path, next_token)

    proposer.advance = off_by_one
    with pytest.raises(AssertionError, match="not close"):
        draft_cache_run(target, draft, proposer, Sampling(), monkeypatch)
