"""Costs of drafts whose quality is assumed: the model from seconds written down here, and what is really decoded."""

import time

import pytest
import torch

from drafttrain.drafts.base import Proposal, Proposer
from drafttrain.evaluate import sizes
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.sizes import batches, costs_from, measure_drafts
from tests.tiny_drafts import make_target

NOD, RATES = 0.004, (0.6, 0.36, 0.2)


class Sleeper(Proposer):
    """Drafts zeros and takes NOD seconds for each."""

    def begin(self, step, next_token, sampling, streams):
        pass

    def propose(self, k, stop=None):
        time.sleep(NOD * int(k.max()))
        return Proposal(torch.zeros(len(k), int(k.max()), dtype=torch.long), k)

    def advance(self, step, path, next_token):
        pass

    def keep(self, rows):
        pass


def spent(draft: float, verify: float, rest: float, begin: float = 0.0) -> dict[str, float]:
    return {"prefill": 1.0, "begin": begin, "draft": draft, "verify": verify, "rest": rest}


def test_costs_by_hand():
    """A plain step takes .09 + .01 = .1 s; the draft takes .01 + .01 K s a round; a slow repeat counts for nothing."""
    seconds = {
        ("", 0): [spent(0, 0.09, 0.01), spent(0, 0.08, 0.01), spent(0, 0.3, 0.05)],
        ("a", 1): [spent(0.02, 0.1, 0.02, 0.3), spent(0.02, 0.1, 0.02, 0.3), spent(0.9, 0.1, 0.02, 0.3)],
        ("a", 4): [spent(0.05, 0.15, 0.02, 0.3), spent(0.04, 0.15, 0.02, 0.3), spent(0.06, 0.15, 0.02, 0.3)],
    }
    widths = {1: 0.09, 2: 0.1, 3: 0.11, 4: 0.12, 5: 0.15}
    costs = costs_from(seconds, {"a": (0.6, 0.4, 0.2, 0.1)}, widths, [0.03, 0.04, 0.05])
    assert costs.step == pytest.approx(0.1) and costs.head == 0.04
    draft = costs.drafts["a"]
    assert draft.c == pytest.approx((0.125, 0.1, 0.15))
    found = draft.model.predict(4)
    assert (found["c"], found["v"], found["o"]) == pytest.approx((0.125, 1.5, 0.2))
    assert found["speedup"] == pytest.approx(2.3 / (1.5 + 0.5 + 0.2))
    assert draft.model.predict(2)["c"] == pytest.approx(0.3 / 2) and draft.model.verify_at(2) == pytest.approx(1.1)
    assert draft.model.verify_at(0) == pytest.approx(0.9) and draft.model.begin == pytest.approx(3)


def test_the_target_s_own_work_is_pooled_over_the_drafts():
    """Two drafts that differ in the noise of the target's forward alone are predicted alike."""
    seconds = {
        ("", 0): [spent(0, 0.09, 0.01)],
        ("a", 1): [spent(0.02, 0.1, 0.02), spent(0.02, 0.14, 0.02)],
        ("b", 1): [spent(0.02, 0.2, 0.06), spent(0.02, 0.12, 0.04)],
    }
    costs = costs_from(seconds, {"a": (0.5,), "b": (0.5,)}, {1: 0.09, 2: 0.1}, [0.0])
    first, second = (costs.drafts[label].model.predict(1) for label in "ab")
    assert first == second and first["v"] == pytest.approx(1.3) and first["o"] == pytest.approx(0.3)


def test_whole_rounds_are_timed_interleaved_at_the_given_acceptance(monkeypatch):
    target, decoded, done = make_target(), [], []
    real = sizes.generate

    def watch(*args, **options):
        out = real(*args, **options)
        decoded.append((args[2] is not None, options["k"], options["requests"], out.counts))
        return out

    monkeypatch.setattr(sizes, "generate", watch)
    costs = measure_drafts(
        target,
        {"slow": Sleeper, "other": Sleeper},
        {"slow": RATES, "other": RATES[:1]},
        context=6,
        rounds=8,
        repeats=3,
        progress=lambda count, label: done.append(label),
    )
    plain, deep = ([one for one in decoded if one[:2] == key] for key in ((False, 1), (True, 3)))
    assert len(plain) == 1 + 3 and len(deep) == 1 + 3  # a warm-up each
    assert len(decoded) == 4 + batches([3, 1], 3) and len(done) == batches([3, 1], 3) and "plain" in done
    assert done[:4] != done[4:8] or done[4:8] != done[8:]  # another order in every repeat
    assert {tuple(one[2]) for one in deep} == {(0,), (1,), (2,)}
    # max_new_tokens follows the assumed tau, so that about as many rounds are timed whatever is accepted.
    assert all(4 <= one[3].iterations <= 14 for one in deep[1:])
    assert all(one[3].iterations == 8 for one in plain[1:])
    slow = costs.drafts["slow"]
    assert min(slow.c) >= NOD / costs.step and max(slow.model.drafting) == 3
    assert len(costs.plain) == 3 and min(costs.plain) > 0 and costs.head > 0
    assert slow.model.acceptance[3] == RATES and costs.drafts["other"].model.predict(1)["tau"] == pytest.approx(1.6)


def test_several_requests_at_a_time():
    costs = measure_drafts(make_target(), {"x": Sleeper}, {"x": RATES}, context=6, concurrency=3, rounds=2, repeats=1)
    assert costs.drafts["x"].model.concurrency == 3 and costs.step > 0


def test_too_few_positions():
    target = make_target(max_position_embeddings=32)
    with pytest.raises(EvaluationError, match="takes 32 positions.*smaller K"):
        measure_drafts(target, {"x": Sleeper}, {"x": RATES}, rounds=8)
