"""EAGLE-3 in other shapes than the plain one: EAGLE-3.1's norms, any number of features and layers, another hidden
size, embeddings of its own, a sliding window. Training and serving compute the same, and what the definition says."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_start import first_embeddings, first_head, normed_rms
from drafttrain.drafts.fresh_student import principal_axes
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.nn.tree import DynamicTree, StaticTree
from drafttrain.recipe import DraftConfig
from drafttrain.specdec.decode import generate
from tests.drafts.test_eagle3 import EVERY_THIRD, check_against_the_plain_loss, parity_error
from tests.drafts.test_eagle3_replay import replay
from tests.tiny_drafts import LAYERS, features_of, make_batch, make_draft, make_target, plain, train
from tests.tiny_models import V, tokens

EVERYTHING = {
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "sliding_window": 4,
    "norm_before_residual": True,
}
SHAPES = {
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_hidden_layers": 2},
    "narrow": {"hidden_size": 24},
    "wide": {"hidden_size": 40, "num_key_value_heads": 1},
    "own embeddings": {"train_embeddings": True},
    "window 1": {"sliding_window": 1},
    "window 4": {"sliding_window": 4, "num_hidden_layers": 2},
    "everything": EVERYTHING,
    "one feature": {"layers": [5], "fc_norm": True},
    "five features": {"layers": [0, 1, 3, 6, 8], "hidden_size": 24},
}


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.parametrize("name", SHAPES)
def test_cached_drafting_reproduces_the_training_time_logits(target, name):
    draft = make_draft(target, EVERY_THIRD, **SHAPES[name])
    assert parity_error(target, draft) < 1e-4


@pytest.mark.parametrize("name", ["eagle-3.1", "window 4", "everything"])
def test_captured_steps_reproduce_them_too(target, name):
    assert parity_error(target, make_draft(target, **SHAPES[name]), captured=True) < 1e-4


def by_hand(target, draft, ids, features, steps):
    """The normed states [steps][T, H] of one row of text, each from the list of keys that its query may see; residuals
    are carried from layer to layer as vLLM does."""
    w, shape, T = {name: tensor.detach() for name, tensor in draft.state_dict().items()}, draft.shape, ids.shape[1]
    heads, groups, hd = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim

    def rms(x, name):
        return x / (x.square().mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt() * w[name]

    def attention(x, position, prefix, cache):
        cos, sin = target.decoder.rotary_emb(x, torch.tensor([[position]]))
        q, k, v = ((w[f"{prefix}.self_attn.{name}_proj.weight"] @ x).view(1, -1, 1, hd) for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        seen = [
            (keys, values)
            for at, keys, values in cache
            if shape.sliding_window is None or position - at < shape.sliding_window
        ]
        seen.append((k, v))
        cache.append((position, k, v))
        keys, values = (torch.cat(part, 2).repeat_interleave(heads // groups, 1) for part in zip(*seen, strict=True))
        out = F.softmax(q @ keys.transpose(2, 3) / math.sqrt(hd), -1) @ values
        return w[f"{prefix}.self_attn.o_proj.weight"] @ out.flatten()

    def mlp(x, prefix):
        gate, up, down = (w[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (F.silu(gate @ x) * (up @ x))

    table = w.get("embed_tokens.weight", target.embed_weight)
    states = [torch.zeros(T, shape.hidden_size) for _ in range(steps)]
    committed = [[] for _ in range(shape.num_hidden_layers)]
    for row in range(T):
        wide = features[0, row]
        if shape.norm_before_fc:
            wide = rms(wide, "input_norm.weight")
        parts = wide.split(shape.target_hidden_size)
        if shape.fc_norm:
            parts = [rms(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        hidden = w["fc.weight"] @ (torch.cat(list(parts)) / w["feature_rms"])
        caches = committed
        for k in range(steps):
            token = ids[0, row + 1 + k] if row + 1 + k < T else torch.tensor(0)
            normed = rms(hidden, "midlayer.hidden_norm.weight")
            residual = normed if shape.norm_before_residual else hidden
            x = torch.cat([rms(table[token], "midlayer.input_layernorm.weight"), normed])
            for i in range(shape.num_hidden_layers):
                prefix = f"layers.{i}" if i else "midlayer"
                if i:
                    residual = residual + x
                    x = rms(residual, f"{prefix}.input_layernorm.weight")
                residual = residual + attention(x, row + k, prefix, caches[i])
                x = mlp(rms(residual, f"{prefix}.post_attention_layernorm.weight"), prefix)
            hidden = residual + x
            states[k][row] = rms(hidden, "norm.weight")
            if shape.norm_output:
                hidden = states[k][row]
            caches = [list(cache) for cache in caches]  # What runs ahead is not committed.
    return states


@pytest.mark.parametrize("name", SHAPES)
def test_the_unroll_is_what_the_definition_says(target, name):
    draft, ids = make_draft(target, **SHAPES[name]), tokens(1, 9)
    features = features_of(target, ids, draft.feature_layers)
    expected = by_hand(target, draft, ids, features, 4)
    for k, state in enumerate(draft.unroll(ids, features, 4)):
        torch.testing.assert_close(state[0], expected[k], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["eagle-3.1", "wide", "everything", "own embeddings"])
def test_objective_figures_and_gradients_by_definition(target, name):
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 3:9] = mask[1, 7:] = True
    draft = make_draft(target, EVERY_THIRD, **SHAPES[name])
    draft.ttt_steps = 3
    check_against_the_plain_loss(draft, make_batch(target, tokens(2, 12), mask, draft.feature_layers))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["norm_output", "window 4", "everything"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_node_of_a_tree_is_what_its_own_path_says(target, name, dynamic, captured):
    """Each node's rank among the training-time logits along its path."""
    tree = StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0, 0]])
    tree = DynamicTree(2, 9) if dynamic else tree
    draft, prompts, lengths = make_draft(target, **SHAPES[name]), tokens(2, 8), torch.tensor([8, 5])
    proposer, K = draft.proposer(target, tree), 4
    if captured:
        proposer.reserve(2, 30, K)
    step, last = target.step(prompts, RaggedCache(2), lengths, draft.feature_layers), torch.tensor([4, 17])
    proposer.begin(step, last, Sampling(), Streams(0, [0, 1]))
    proposal = proposer.propose(torch.full((2,), K))
    assert int(proposal.lengths.min()) >= 8
    for row in range(2):
        text, parents = torch.cat([prompts[row, : lengths[row]], last[row, None]]), proposal.parents[row].tolist()
        for node in range(int(proposal.lengths[row])):
            path, at = [], parents[node]
            while at >= 0:
                path.insert(0, int(proposal.tokens[row, at]))
                at = parents[at]
            ids = torch.cat([text, torch.tensor(path, dtype=torch.long)])[None]
            state = draft.unroll(ids, features_of(target, ids, draft.feature_layers), len(path) + 1)[-1]
            best = draft.draft_ids[draft.lm_head(state[0, len(text) - 2]).topk(2).indices]
            siblings = [i for i in range(node) if parents[i] == parents[node]]
            if not dynamic:
                assert proposal.tokens[row, node] == best[len(siblings)]
            assert proposal.tokens[row, node] in best


TRAINED = {
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "two layers, narrow, window": {"num_hidden_layers": 2, "hidden_size": 24, "sliding_window": 6},
}


@pytest.mark.parametrize("name", TRAINED)
def test_teacher_forced_replay_gives_the_loops_counts(target, name):
    prompts = torch.randint(3, V, (3, 8), generator=torch.Generator().manual_seed(2)).tolist()
    texts = torch.tensor([p + c for p, c in zip(prompts, plain(target, prompts, 30), strict=True)])
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[:, :8] = False
    draft = make_draft(target, **TRAINED[name])
    draft.ttt_steps = 4
    losses = train(draft, make_batch(target, texts[:2, :24], mask[:2, :24]), 40)
    assert losses[-1] < 0.3 * losses[0]
    done = generate(target, prompts, draft.proposer(target), k=3, max_new_tokens=24, stop_ids=())
    assert [g.tokens for g in done.generations] == texts[:, 8:32].tolist()
    rounds = replay(draft, texts, features_of(target, texts), 8, 24, 3)
    for mine, generation in zip(rounds, done.generations, strict=True):
        assert (generation.counts.iterations, generation.counts.accepted) == (len(mine), sum(mine))
    assert done.counts.per_position_acceptance[-1] > 0
    alone = generate(target, prompts[:1], draft.proposer(target), k=3, max_new_tokens=24, stop_ids=())
    assert alone.generations[0].counts == done.generations[0].counts


# --- where it starts


def test_a_draft_of_the_targets_size_starts_as_the_targets_head(target):
    """fc passes the last feature on, the head and the gain are the target's own."""
    draft = make_draft(target, EVERY_THIRD)
    rms = torch.rand(32) + 0.5
    draft.initialise(torch.ones(96), rms)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draft.fuse(x), x[:, 64:])
    assert torch.equal(draft.lm_head.weight, target.lm_head_weight[EVERY_THIRD]) and torch.equal(draft.norm.weight, rms)


def test_a_narrow_head_is_the_best_of_its_rank_and_a_wide_one_exact():
    generator = torch.Generator().manual_seed(3)
    rows, gain = torch.randn(50, 12, generator=generator), torch.rand(12, generator=generator) + 0.5
    x = torch.randn(7, 12, generator=generator)
    exact = x @ (rows * gain).T
    for size in (6, 11, 12, 16):
        fc, head, norm = first_head(rows, gain, size)
        assert fc.shape == (size, 12) and head.shape == (50, size) and norm.shape == (size,)
        u, s, v = torch.linalg.svd(rows * gain, full_matrices=False)
        best = x @ ((u[:, :size] * s[:size]) @ v[:size]).T
        torch.testing.assert_close((x @ fc.T * norm) @ head.T, best if size < 12 else exact, rtol=1e-4, atol=1e-4)
    table = torch.randn(40, 12, generator=generator)
    narrow, wide = first_embeddings(table, 5), first_embeddings(table, 15)
    u, s, v = torch.linalg.svd(table, full_matrices=False)
    best = (u[:, :5] * s[:5]) @ v[:5]
    torch.testing.assert_close(narrow @ principal_axes(table, 5).T, best, rtol=1e-4, atol=1e-4)
    assert torch.equal(wide[:, :12], table) and wide[:, 12:].eq(0).all()


@pytest.mark.parametrize("size", [16, 40])
def test_another_size_starts_below_guessing_and_learns_its_embeddings(target, size):
    config = Eagle3Config.for_target(target, DraftConfig(hidden_size=size, fc_norm=True), [1, 4, 8], V)
    draft = Eagle3Draft(config).attach(target)
    mask = torch.ones(2, 12, dtype=torch.bool)
    batch = make_batch(target, tokens(2, 12), mask, [1, 4, 8])
    normed = target.final_norm(batch.last_hidden)
    draft.initialise(batch.features.square().mean((0, 1)).sqrt(), normed.square().mean((0, 1)).sqrt())
    assert torch.equal(draft.embed_tokens.weight, first_embeddings(target.embed_weight, size))
    assert draft.calibrate(batch) < math.log(V)
    assert draft.train_embeddings(None).embed_tokens.weight.requires_grad
    before = draft.embed_tokens.weight.detach().clone()
    train(draft, batch, 3)
    moved = (draft.embed_tokens.weight - before).abs().amax(-1) > 0
    assert moved[batch.input_ids[:, 1:-1].unique()].all() and moved.sum() <= batch.input_ids.unique().numel() + 1


def test_whose_embeddings_are_read_and_which_learn(target):
    shared = make_draft(target).train_embeddings(None)
    assert shared.embed_tokens is None and "embed_tokens.weight" not in shared.state_dict()
    own = make_draft(target).train_embeddings(True)
    assert own.shape.own_embeddings and own.embed_tokens.weight.requires_grad
    assert torch.equal(own.embed_tokens.weight, target.embed_weight)
    own.embed_tokens.weight.data += 1
    assert (
        torch.equal(own.embed(tokens()), target.embed_weight[tokens()] + 1)
        and own.share_embeddings().embed_tokens is not None
    )
    assert not make_draft(target, hidden_size=24).train_embeddings(False).embed_tokens.weight.requires_grad
    copied = make_draft(target).train_embeddings(True)
    copied.embed_tokens.weight.data = target.embed_weight.to(torch.float16).float()
    assert copied.share_embeddings().embed_tokens is None and not copied.shape.own_embeddings
    alone = Eagle3Config.for_target(target, DraftConfig(), LAYERS, V)
    config = Eagle3Config(**{**vars(alone), "hidden_size": 24})
    with pytest.raises(DraftError, match=r"hidden size is 24, the target's embeddings have 32.*embed_tokens.weight"):
        Eagle3Draft(config).attach(target)


# --- norms before fc and the static scale


@pytest.mark.parametrize(("switch", "width"), [("fc_norm", 32), ("norm_before_fc", 96)])
def test_the_static_scale_comes_behind_the_norms(switch, width):
    """There it evens out what the norms leave uneven; in front it would be another function, which no fc makes good."""
    target = make_target()
    draft = make_draft(target, **{switch: True})
    rms = torch.logspace(-1, 3, 96)
    features = torch.randn(400, 96, generator=torch.Generator().manual_seed(0)) * rms
    draft.initialise(rms, torch.ones(32))
    for name, weight in draft.named_parameters():
        if name.startswith(("fc_norm", "input_norm")):
            weight.requires_grad_(False).fill_(1)
    parts = features.split(width, -1)
    normed = torch.cat([part / part.square().mean(-1, keepdim=True).sqrt() for part in parts], -1)
    torch.testing.assert_close(draft.feature_rms, normed_rms(rms, 96 // width))
    scaled = (normed / draft.feature_rms).square().mean(0).sqrt()
    assert scaled.min() > 0.5 and scaled.max() < 3  # The norms alone leave four decades.
    torch.testing.assert_close(
        draft.fuse(features), (normed / draft.feature_rms) @ draft.fc.weight.T, rtol=1e-3, atol=1e-3
    )
