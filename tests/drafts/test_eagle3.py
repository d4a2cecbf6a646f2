"""EAGLE-3: training and serving compute the same, and planted faults (mask, RoPE, layer ids) are caught."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drafttrain.drafts import eagle3
from drafttrain.drafts.base import supervised_rows
from drafttrain.nn import losses
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling, Streams, warp
from tests.tiny_drafts import LAYERS, features_of, make_batch, make_draft, make_target
from tests.tiny_models import V, tokens

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EVERY_THIRD = torch.arange(0, V, 3)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def batch(target):
    """Two rows of 14: a prompt, a turn of 5 tokens, a prompt, a turn of 3; and a prompt of 9, a turn of 5."""
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, 3:8] = mask[0, 11:14] = mask[1, 9:] = True
    return make_batch(target, tokens(2, 14), mask)


def logits_of_proposal(proposer, k):
    """propose(k), and the draft's logits of each step [K, B, Vd] as its head gave them."""
    seen = []
    handle = proposer.draft.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    proposal = proposer.propose(k)
    handle.remove()
    return proposal, torch.stack(seen)


def parity_error(target, draft, sampling=Sampling(), K=5, captured=False) -> float:  # noqa: B008
    """Largest difference, as a share of the largest logit, between cached drafting (a ragged batch, several rounds with
    arbitrary acceptance; in the steps that CUDA captures, if asked) and the training-time unroll over the same tokens.
    """
    generator = torch.Generator().manual_seed(7)
    prompts, lengths = torch.randint(3, V, (3, 9), generator=generator), torch.tensor([5, 9, 2])
    last = torch.tensor([4, 17, 60])
    proposer, cache, rows = draft.proposer(target), RaggedCache(3), torch.arange(3)
    step = target.step(prompts, cache, lengths, proposer.feature_layers)
    cache.lengths = lengths.clone()
    if captured:
        proposer.reserve(3, 30, K)
    proposer.begin(step, last, sampling, Streams(0, [0, 1, 2]))
    texts = [torch.cat([prompts[row, : lengths[row]], last[row, None]]) for row in rows]
    worst = 0.0
    for accepted in ([2, 0, 5], [0, 3, 1], [5, 5, 0], [0, 0, 0]):
        proposal, served = logits_of_proposal(proposer, torch.full((3,), K))
        for row in rows:
            ids = torch.cat([texts[row], proposal.tokens[row]])[None]
            states = draft.unroll(ids, features_of(target, ids, draft.feature_layers), K)
            trained = torch.stack([draft.lm_head(state[0, len(texts[row]) - 2]) for state in states])
            worst = max(worst, ((trained - served[:, row]).abs().max() / served.abs().max()).item())
            if sampling.draws_drafts:
                torch.testing.assert_close(proposal.q[row], warp(trained, sampling), rtol=1e-3, atol=1e-5)
        step = target.step(torch.cat([last[:, None], proposal.tokens], 1), cache, None, proposer.feature_layers)
        last = torch.randint(3, V, (3,), generator=generator)
        count = torch.tensor(accepted)
        path = torch.arange(max(accepted + [1])).expand(3, -1)
        proposer.advance(step, path.masked_fill(path >= count[:, None], -1), last)
        cache.lengths = cache.lengths + count + 1
        texts = [torch.cat([texts[row], proposal.tokens[row, : count[row]], last[row, None]]) for row in rows]
    return worst


SHAPES = [
    {},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"norm_before_residual": True},
    {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 20},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ids", [None, EVERY_THIRD], ids=["whole", "third"])
def test_cached_drafting_reproduces_the_training_time_logits(target, shape, ids):
    assert parity_error(target, make_draft(target, ids, **shape)) < 1e-4


@pytest.mark.parametrize(
    ("family", "changes"), [("Llama", {"rope_parameters": LLAMA3}), ("Gemma3", {}), ("GptOss", {})]
)
def test_parity_holds_with_the_targets_rope_scaling(family, changes):
    target = make_target(family, **changes)
    draft = make_draft(target)
    assert draft.shape.rope_scaling == target.rope()["rope_scaling"]
    assert (draft.shape.rope_scaling is None) == (family == "Gemma3")
    assert parity_error(target, draft) < 1e-4


def test_parity_of_drawn_drafts_and_their_q(target):
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.95, draft_mode="probabilistic")
    assert parity_error(target, make_draft(target, EVERY_THIRD), sampling) < 1e-4


@contextmanager
def later_steps_at_the_rows_own_position(draft):
    """The fault: RoPE position p at unroll step k of row p instead of p + k, in training only."""
    unroll = draft.unroll

    def faulty(*args):
        rotary = draft.rotary
        draft.rotary = lambda positions, dtype: rotary(positions - positions[:, :1], dtype)
        states = unroll(*args)
        del draft.rotary
        return states

    draft.unroll = faulty
    yield
    del draft.unroll


def test_a_wrong_rope_position_of_later_steps_is_caught(target):
    draft = make_draft(target)
    with later_steps_at_the_rows_own_position(draft):
        assert parity_error(target, draft) > 0.01
    assert parity_error(target, draft) < 1e-4


def test_layer_ids_off_by_one_are_caught(target):
    draft = make_draft(target)
    proposer = draft.proposer(target)
    proposer.feature_layers = [k + 1 for k in LAYERS]
    draft.proposer = lambda target: proposer
    assert parity_error(target, draft) > 0.01


def test_step_0_equals_a_plain_forward(target):
    """The layer written out once more, with the target's own rotary embedding and torch's causal attention."""
    ids = tokens(2, 12)
    features = features_of(target, ids)
    for draft in (make_draft(target), make_draft(target, norm_before_residual=True)):
        w = draft.state_dict()

        def rms(x, name, w=w):
            return x / (x.square().mean(-1, keepdim=True) + target.rms_norm_eps).sqrt() * w[name]

        hidden = (features / w["feature_rms"]) @ w["fc.weight"].T
        embedded = target.model.get_input_embeddings()(F.pad(ids[:, 1:], (0, 1)))
        normed = rms(hidden, "midlayer.hidden_norm.weight")
        x = torch.cat([rms(embedded, "midlayer.input_layernorm.weight"), normed], -1)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(1, 2) for n in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *target.decoder.rotary_emb(x, torch.arange(12)[None]))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = (normed if draft.shape.norm_before_residual else hidden) + attended @ w[
            "midlayer.self_attn.o_proj.weight"
        ].T
        x = rms(hidden, "midlayer.post_attention_layernorm.weight")
        gated = F.silu(x @ w["midlayer.mlp.gate_proj.weight"].T) * (x @ w["midlayer.mlp.up_proj.weight"].T)
        hidden = hidden + gated @ w["midlayer.mlp.down_proj.weight"].T
        torch.testing.assert_close(draft.unroll(ids, features, 1)[0], rms(hidden, "norm.weight"), rtol=1e-4, atol=1e-4)


def test_state_k_of_row_p_reads_tokens_up_to_p_plus_1_plus_k_and_features_up_to_p(target):
    draft, ids, K, T = make_draft(target), tokens(1, 12), 4, 12
    features = features_of(target, ids)
    before = draft.unroll(ids, features, K)
    rows = torch.arange(T)
    for j in range(1, T):
        other = ids.clone()
        other[0, j] = (other[0, j] + 1) % V
        changed_features = features.clone()
        changed_features[:, j] += 1
        by_token, by_feature = draft.unroll(other, features, K), draft.unroll(ids, changed_features, K)
        for k in range(K):
            moved = (by_token[k] - before[k])[0].abs().amax(-1)
            assert moved[rows + 1 + k < j].eq(0).all()
            first = j - 1 - k  # row whose own step-k token it is
            assert first < 0 or moved[first] > 1e-4
            moved = (by_feature[k] - before[k])[0].abs().amax(-1)
            assert moved[:j].eq(0).all() and moved[j] > 1e-4


def counted(mask, row, position, k) -> bool:
    """Step k of row p counts iff x[p+1] .. x[p+2+k] all exist and are supervised."""
    needed = range(position + 1, position + 3 + k)
    return needed[-1] < mask.shape[1] and all(bool(mask[row, i]) for i in needed)


def check_against_the_plain_loss(draft, batch):
    """Objective, figures and gradients row by row from the definition, with `losses`' plain twins."""
    steps = draft.ttt_steps
    objective, sums = 0.0, torch.zeros(5, steps)
    states = draft.unroll(batch.input_ids, batch.features, steps)
    for row in range(batch.input_ids.shape[0]):
        for position in range(batch.input_ids.shape[1]):
            hit_so_far = True
            for k in range(steps):
                if not counted(batch.loss_mask, row, position, k):
                    continue
                at = position + 1 + k
                logits = draft.lm_head(states[k][row, position])[None]
                p = losses.teacher_probabilities(
                    draft.teacher(batch.last_hidden[row, at])[None], batch.target_lse[row, at, None]
                )
                loss = losses.forward_kl(p, logits)[0]
                hit = bool(draft.draft_ids[logits.argmax()] == batch.target_argmax[row, at])
                hit_so_far = hit_so_far and hit
                alpha = losses.acceptance(p, logits)[0].detach()
                sums[:, k] += torch.stack(
                    [torch.tensor(1.0), loss.detach(), torch.tensor(float(hit)), alpha, torch.tensor(float(hit_so_far))]
                )
                objective = objective + draft.step_decay**k * loss
    result = draft(batch)
    figures = result.figures
    torch.testing.assert_close(figures.rows, sums[0], rtol=0, atol=0)
    for mine, expected in zip((figures.loss, figures.hits, figures.alpha, figures.joint), sums[1:], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.objective, objective, rtol=1e-4, atol=1e-4)
    parameters = list(draft.parameters())
    for mine, expected in zip(
        torch.autograd.grad(result.objective, parameters), torch.autograd.grad(objective, parameters), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ids", [None, EVERY_THIRD], ids=["whole", "third"])
def test_objective_figures_and_gradients_by_definition(target, batch, ids):
    draft = make_draft(target, ids)
    draft.ttt_steps = 4
    check_against_the_plain_loss(draft, batch)


def unshifted_rows(loss_mask, steps):
    return supervised_rows(loss_mask.roll(1, 1), steps)


def past_the_turn(loss_mask, steps):
    return supervised_rows(loss_mask, 1).expand(steps, -1, -1)


@pytest.mark.parametrize("fault", [unshifted_rows, past_the_turn])
def test_a_misaligned_loss_mask_is_caught(target, batch, fault, monkeypatch):
    draft = make_draft(target)
    draft.ttt_steps = 3
    monkeypatch.setattr(eagle3, "supervised_rows", fault)
    with pytest.raises(AssertionError):
        check_against_the_plain_loss(draft, batch)


def test_masked_rows_have_zero_gradient(target, batch):
    """The gradient that reaches each step's normed states: zero on rows that do not count, only there."""
    draft, states = make_draft(target), []
    draft.ttt_steps = 4

    def keep(module, args, out):
        out.retain_grad()
        states.append(out)

    handle = draft.norm.register_forward_hook(keep)
    draft(batch).objective.backward()
    handle.remove()
    valid = supervised_rows(batch.loss_mask, 4)
    assert valid[0].sum() == 4 + 2 + 4 and len(states) == 4
    for k, state in enumerate(states):
        reached = state.grad.abs().amax(-1) > 0
        assert torch.equal(reached, valid[k])


def test_nothing_behind_the_mask_matters(target, batch):
    """Other tokens, features and teachers behind what counts (padding, say) leave the objective alone."""
    draft = make_draft(target)
    draft.ttt_steps = 3
    mask = batch.loss_mask.clone()
    mask[:, 11:] = False  # row 0: the turn 3..7; row 1: 9 and 10
    ids = batch.input_ids.clone()
    ids[:, 11:] = 5
    first, second = make_batch(target, batch.input_ids, mask), make_batch(target, ids, mask)
    for name in ("features", "last_hidden", "target_lse"):
        getattr(second, name)[:, 11:] = 1e4
    torch.testing.assert_close(draft(second).objective, draft(first).objective, rtol=1e-5, atol=1e-5)
    assert draft(first).figures.rows.tolist() == [4 + 1, 3, 2]


def test_a_batch_without_supervised_rows_and_very_short_rows(target):
    draft = make_draft(target)
    for length in (1, 2, 3, 12):
        batch = make_batch(target, tokens(2, length), torch.zeros(2, length, dtype=torch.bool))
        loss = draft(batch)
        assert loss.objective == 0 and loss.figures.rows.tolist() == [0] * 7
        assert all(parameter.grad is None or parameter.grad.eq(0).all() for parameter in draft.parameters())
        loss.objective.backward()
        assert all(parameter.grad.eq(0).all() for parameter in draft.parameters() if parameter.grad is not None)
    full = make_batch(target, tokens(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert draft(full).figures.rows.tolist() == [2] + [0] * 6


def test_autocast_changes_little(target, batch):
    draft = make_draft(target)
    exact = draft(batch).objective
    with torch.autocast("cpu", torch.bfloat16):
        rounded = draft(batch).objective
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05) and rounded != exact


@cache
def small_target():
    return make_target(num_hidden_layers=1)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, V - 1), min_size=1, max_size=V))
def test_vocabulary_map(ids):
    """i + d2t[i] = ids, t2d true exactly there, round trip; drafts never leave the set; alpha <= p's mass on it."""
    target, ids = small_target(), torch.tensor(sorted(ids))
    draft = make_draft(target, ids, layers=[0, 1])
    assert torch.equal(torch.arange(len(ids)) + draft.d2t, ids) and torch.equal(draft.draft_ids, ids)
    assert torch.equal(draft.t2d.nonzero()[:, 0], ids)
    index = draft._draft_index
    assert torch.equal(index[ids], torch.arange(len(ids))) and index[~draft.t2d].eq(-1).all()
    prompts = tokens(1, 5)
    for sampling in (Sampling(), Sampling(temperature=2.0, draft_mode="probabilistic")):
        proposer = draft.proposer(target)
        step = target.step(prompts, RaggedCache(1), None, draft.feature_layers)
        proposer.begin(step, torch.tensor([3]), sampling, Streams(0, [0]))
        proposal = proposer.propose(torch.tensor([3]))
        assert torch.isin(proposal.tokens, ids).all()
        assert proposal.q is None or (proposal.q.shape == (1, 3, len(ids)) and torch.equal(proposal.q_ids, ids))
    batch = make_batch(target, prompts, torch.ones_like(prompts, dtype=torch.bool), [0, 1])
    draft.ttt_steps = 1
    figures = draft(batch).figures
    p = target.head()(batch.last_hidden).softmax(-1)[0, 1:4, ids]
    assert figures.alpha[0] <= p.sum() + 1e-5
    assert figures.hits[0] <= torch.isin(batch.target_argmax[0, 1:4], ids).sum()
