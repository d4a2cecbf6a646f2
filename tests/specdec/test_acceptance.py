"""Lossy acceptance rules, held batches, adaptive K in the loop, a ragged batch of sixteen."""

import math

import pytest
import torch

from drafttrain.drafts.base import Proposal
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree, StaticTree
from drafttrain.specdec.decode import GenerateError, generate
from drafttrain.specdec.policy import Confidence, Costs, Goodput, Policy
from drafttrain.specdec.verify import AcceptanceError, Synthetic, Typical, verify
from tests.tiny_drafts import Oracle, SelfProposer, agreeable_draft, make_draft, make_target, plain
from tests.tiny_models import tokens

SAMPLED = Sampling(temperature=1.0)
DRAWN = Sampling(temperature=1.0, draft_mode="probabilistic", seed=5)
LENGTHS = (2, 9, 4, 17, 3, 6, 12, 5, 8, 2, 11, 7, 4, 15, 3, 10)
SIXTEEN = [tokens(1, length)[0].tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def target():
    return make_target("Gemma3")


@pytest.mark.parametrize("tree", [None, DynamicTree(3, 7), StaticTree.from_paths([[0], [1], [0, 0], [1, 0]])], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, DRAWN], ids=["greedy", "one_hot", "probabilistic"])
def test_rows_of_a_ragged_batch_of_sixteen_equal_their_batch_1_runs(target, tree, sampling):
    if isinstance(tree, DynamicTree) and sampling.draws_drafts:
        tree = DynamicTree(3, 7) if not sampling.draws_drafts else None
    draft = agreeable_draft(target)
    options = {"k": 2, "sampling": sampling, "max_new_tokens": 9, "stop_ids": ()}
    together = generate(target, SIXTEEN, draft.proposer(target, tree), **options).generations
    for row, prompt in enumerate(SIXTEEN):
        alone = generate(target, [prompt], draft.proposer(target, tree), requests=[row], **options).generations[0]
        assert together[row].tokens == alone.tokens and together[row].counts == alone.counts


def test_held_rows_change_nothing_but_the_width(target):
    texts = plain(target, SIXTEEN[:4], 60)
    oracles = [Oracle(texts, right=2), Oracle(texts, right=2)]
    widths = []
    options = {"k": 3, "max_new_tokens": 20, "stop_ids": (texts[1][4],)}
    shrunk = generate(target, SIXTEEN[:4], oracles[0], **options)
    held = generate(
        target, SIXTEEN[:4], oracles[1], hold=True, observe=lambda s: widths.append(len(s.tokens)), **options
    )
    assert held.generations == shrunk.generations and set(widths) == {4}
    assert len({len(g.tokens) for g in held.generations}) > 1  # Some row did end early.
    assert held.rounds == shrunk.rounds == max(g.counts.iterations for g in held.generations)


def test_a_held_row_leaves_when_positions_run_out():
    target = make_target(max_position_embeddings=40)
    texts = plain(target, [SIXTEEN[3], SIXTEEN[0]], 20)
    seen = []
    done = generate(
        target,
        [SIXTEEN[3], SIXTEEN[0]],
        Oracle([text * 9 for text in texts], right=[3, 0]),
        k=3,
        max_new_tokens=20,
        stop_ids=(),
        hold=True,
        observe=lambda step: seen.append(len(step.tokens)),
    )
    assert [g.tokens for g in done.generations] == texts and seen[1] == 2


def test_seconds_of_a_row_end_with_it(target):
    done = generate(target, SIXTEEN[:3], max_new_tokens=8, stop_ids=(), hold=True)
    for generation in done.generations:
        assert generation.seconds == pytest.approx(sum(generation.gaps)) == pytest.approx(done.seconds.decode, rel=0.05)
        assert generation.deliveries == [1] * 8 and generation.drafted == [0] * 8 and len(generation.gaps) == 7
    texts = plain(target, SIXTEEN[:1], 9)
    one = generate(target, SIXTEEN[:1], Oracle(texts, right=2), k=2, max_new_tokens=9, stop_ids=()).generations[0]
    assert one.deliveries == [1, 3, 3, 2] and one.drafted == [0, 2, 2, 2]  # Cut after two drafts of the last round.


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, DRAWN], ids=["greedy", "one_hot", "probabilistic"])
def test_synthetic_acceptance_comes_out_as_set(target, sampling):
    """tau = 1 + the rates' sum, within a 99.9% interval of so many rounds; each position too; n-gram's k is its own."""
    rates = (0.8, 0.5, 0.45)
    draft = make_draft(target)
    done = generate(
        target,
        [SIXTEEN[1]] * 24,
        draft.proposer(target),
        k=3,
        sampling=sampling,
        max_new_tokens=60,
        stop_ids=(),
        acceptance=Synthetic(rates),
    )
    counts = done.counts
    for found, rate in zip(counts.per_position_acceptance, rates, strict=True):
        assert abs(found - rate) < 3.3 * math.sqrt(rate * (1 - rate) / counts.iterations)
    variance = sum((2 * i + 1) * rate for i, rate in enumerate(rates)) - sum(rates) ** 2
    assert abs(counts.mean_acceptance_length - 2.75) < 3.3 * math.sqrt(variance / counts.iterations)


def test_synthetic_rates_of_one_and_zero_are_exact(target):
    for rate, tau in ((1.0, 4), (0.0, 1)):
        done = generate(
            target,
            [SIXTEEN[1]],
            make_draft(target).proposer(target),
            k=3,
            max_new_tokens=13,
            stop_ids=(),
            acceptance=Synthetic((rate,) * 3),
        )
        assert done.counts.mean_acceptance_length == tau


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.2,), (0.5, -0.1)])
def test_rates_that_are_no_joint_rates_are_refused(rates):
    with pytest.raises(AcceptanceError, match="never"):
        Synthetic(rates)


def test_synthetic_acceptance_takes_no_tree(target):
    proposer = make_draft(target).proposer(target, DynamicTree(2, 4))
    with pytest.raises(AcceptanceError, match="expected a chain"):
        generate(target, [SIXTEEN[0]], proposer, acceptance=Synthetic((0.5,)))


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 0.3), (1, 0.3), (0.09, 0)])
def test_typical_numbers_out_of_range(epsilon, delta):
    with pytest.raises(AcceptanceError, match="epsilon"):
        Typical(epsilon, delta)


def test_typical_acceptance_by_hand():
    """p = (.5, .3, .15, .05): H = 1.142, bound = min(.09, .3 exp(-H)) = .09 for the first; a flat p has a lower one."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    entropy = -(p * p.log()).sum()
    assert min(0.09, 0.3 * math.exp(-entropy)) == 0.09
    drafts = torch.tensor([[0], [1], [2], [3]])
    uniforms = torch.full((4, 2), 0.999999, dtype=torch.float64)
    proposal = Proposal(drafts, torch.ones(4, dtype=torch.long))
    path, _ = verify(p.log().expand(4, 2, 4), proposal, SAMPLED, uniforms, Typical())
    assert path[:, 0].tolist() == [0, 0, 0, -1]
    path, _ = verify(p.log().expand(4, 2, 4), proposal, SAMPLED, uniforms, Typical(epsilon=0.4, delta=0.9))
    # bound = min(.4, .9 exp(-1.142)) = .287
    assert path[:, 0].tolist() == [0, 0, -1, -1]


def test_typical_acceptance_takes_the_deepest_typical_path():
    """Nodes 0 and 1 hang on the root, 2 on 1: node 0 is likelier, but the path over 1 is longer."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    proposal = Proposal(torch.tensor([[0, 1, 2]]), torch.tensor([3]), torch.tensor([[-1, -1, 1]]))
    uniforms = torch.tensor([[0.0, 0.0, 0.0, 0.99]], dtype=torch.float64)
    path, after = verify(p.log().expand(1, 4, 4), proposal, SAMPLED, uniforms, Typical())
    assert path.tolist() == [[1, 2]] and after.tolist() == [3]
    none = Proposal(torch.tensor([[3, 3, 2]]), torch.tensor([3]), torch.tensor([[-1, -1, 1]]))
    assert verify(p.log().expand(1, 4, 4), none, SAMPLED, uniforms, Typical())[0].tolist() == [[-1]]


def test_typical_acceptance_changes_the_distribution():
    """It is lossy: with drafts that always say token 1, more than p(1) of the output is token 1."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniforms = torch.rand(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(torch.ones(4000, 1, dtype=torch.long), torch.ones(4000, dtype=torch.long))
    path, _ = verify(p.log().expand(4000, 2, 4), proposal, SAMPLED, uniforms, Typical())
    assert (path[:, 0] == 0).all()
    path, _ = verify(p.log().expand(4000, 2, 4), proposal, SAMPLED, uniforms)
    assert (path[:, 0] == 0).double().mean().item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, DRAWN], ids=["greedy", "one_hot", "probabilistic"])
def test_a_confidence_policy_shortens_drafts_and_keeps_the_text(target, sampling):
    draft = agreeable_draft(target)
    options = {"k": 4, "sampling": sampling, "max_new_tokens": 16, "stop_ids": ()}
    done = generate(target, SIXTEEN[:5], draft.proposer(target), policy=Confidence(0.09), **options)
    counts = done.counts
    assert 0 < counts.drafted < 4 * counts.iterations and len([n for n in counts.lengths if n]) > 1
    if sampling.greedy:
        assert [g.tokens for g in done.generations] == plain(target, SIXTEEN[:5], 16)
    for row in (0, 3):
        alone = generate(
            target, [SIXTEEN[row]], draft.proposer(target), policy=Confidence(0.09), requests=[row], **options
        ).generations[0]
        assert alone.tokens == done.generations[row].tokens


def test_a_stopped_draft_keeps_its_probability(target):
    """The target as its own draft is always accepted, whatever the policy cuts: q is p."""
    for threshold in (0.05, 0.3):

        class Watched(SelfProposer):
            def propose(self, k, stop=None):
                return super().propose(k)

        done = generate(
            target,
            SIXTEEN[:3],
            Watched(target),
            k=3,
            sampling=DRAWN,
            max_new_tokens=9,
            stop_ids=(),
            policy=Confidence(threshold),
        )
        assert done.counts.acceptance_rate == 1


def test_goodput_drafts_nothing_for_a_useless_draft_and_all_for_a_perfect_one(target):
    costs = Costs(0.1, [1.0, 1.05, 1.1, 1.15, 1.2], 0.0)
    texts = plain(target, SIXTEEN[:2], 120)
    for right, expected in ((0, 0), (4, 4)):
        policy = Goodput(costs, probe=1000)
        done = generate(target, SIXTEEN[:2], Oracle(texts, right), k=4, max_new_tokens=100, stop_ids=(), policy=policy)
        assert [g.tokens for g in done.generations] == [text[:100] for text in texts]
        assert policy.best(4) == expected
        assert done.counts.lengths[expected] == max(done.counts.lengths)


def test_a_policy_sees_every_round(target):
    class Counting(Policy):
        def __init__(self):
            self.seen = []

        def observe(self, drafted, accepted):
            self.seen.append((drafted.tolist(), accepted.tolist()))

    policy, texts = Counting(), plain(target, SIXTEEN[:1], 20)
    done = generate(target, SIXTEEN[:1], Oracle(texts, [2, 3]), k=3, max_new_tokens=8, stop_ids=(), policy=policy)
    assert policy.seen == [([3], [2]), ([3], [3])] and done.rounds == 2


def test_k_deeper_than_a_static_tree(target):
    proposer = make_draft(target).proposer(target, StaticTree.from_paths([[0], [0, 0]]))
    with pytest.raises(GenerateError, match="at most 2 tokens deep"):
        generate(target, [SIXTEEN[0]], proposer, k=3)
