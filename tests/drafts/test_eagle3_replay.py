"""A trained EAGLE-3 draft: what training counts teacher-forced is, round by round, what the decoding loop accepts."""

import pytest
import torch

from drafttrain.specdec.decode import generate
from tests.tiny_drafts import LAYERS, features_of, make_batch, make_draft, make_target, plain, train
from tests.tiny_models import V


@pytest.fixture(scope="module", params=["Llama", "Gemma3"])
def trained(request):
    """A target, prompts and a draft that was trained for a second on some of the target's own answers."""
    target = make_target(request.param)
    prompts = torch.randint(3, V, (5, 8), generator=torch.Generator().manual_seed(2)).tolist()
    texts = torch.tensor([p + c for p, c in zip(prompts, plain(target, prompts, 60), strict=True)])
    ids = texts[:, 8:].unique()[1:]  # one of the target's tokens is missing
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[:, :8] = False
    draft = make_draft(target, ids)
    draft.ttt_steps = 7
    losses = train(draft, make_batch(target, texts[:4, :40], mask[:4, :40]), 50)
    assert losses[-1] < 0.3 * losses[0]
    return target, prompts, texts, draft


def replay(draft, texts, features, prompt_length, count, K):
    """What the loop must count on known greedy texts, teacher-forced: [accepted of each round] of each row.

    `count` new tokens are wanted; the first comes from the prefill. Row p = L - 1 drafts what follows x[L]."""
    states = draft.unroll(texts, features, K)
    guesses = torch.stack([draft.draft_ids[draft.lm_head(state).argmax(-1)] for state in states])
    rounds = []
    for row, text in enumerate(texts):
        at, mine = prompt_length, []
        while at + 1 < prompt_length + count:
            right = guesses[:, row, at - 1] == text[at + 1 : at + 1 + K]
            mine.append(int(right.long().cumprod(0).sum()))
            at += mine[-1] + 1
        rounds.append(mine)
    return rounds


@pytest.mark.parametrize("K", [1, 3, 7])
def test_teacher_forced_replay_gives_the_loops_counts(trained, K):
    target, prompts, texts, draft = trained
    done = generate(target, prompts, draft.proposer(target), k=K, max_new_tokens=50, stop_ids=())
    assert [g.tokens for g in done.generations] == texts[:, 8:58].tolist()
    rounds = replay(draft, texts, features_of(target, texts), 8, 50, K)
    for mine, generation in zip(rounds, done.generations, strict=True):
        counts = generation.counts
        assert (counts.iterations, counts.drafted, counts.accepted) == (len(mine), K * len(mine), sum(mine))
        assert counts.reached == [sum(accepted > i for accepted in mine) for i in range(K)]
    assert 0.15 < done.counts.per_position_acceptance[0] < 0.99
    assert done.counts.per_position_acceptance[-1] > 0


def test_replay_catches_layer_ids_off_by_one(trained):
    target, prompts, texts, draft = trained
    proposer = draft.proposer(target)
    proposer.feature_layers = [k + 1 for k in LAYERS]
    done = generate(target, prompts, proposer, k=3, max_new_tokens=50, stop_ids=())
    assert [g.tokens for g in done.generations] == texts[:, 8:58].tolist()  # lossless all the same
    rounds = replay(draft, texts, features_of(target, texts), 8, 50, 3)
    assert done.counts.accepted < sum(map(sum, rounds))
