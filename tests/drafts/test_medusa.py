"""Medusa heads: labels, loss and gradients against ordinary forwards of the target, files, and what is refused."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from drafttrain.drafts import DraftError, load_draft, medusa
from drafttrain.drafts.base import supervised_rows
from drafttrain.drafts.loading import new_draft
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.export.folder import save_draft
from drafttrain.nn import losses
from drafttrain.nn.objective import Objective
from drafttrain.nn.tree import DynamicTree, StaticTree
from drafttrain.recipe import DraftConfig, parse_recipe
from drafttrain.specdec.decode import GenerateError, generate
from tests.tiny_drafts import make_batch, make_target, train
from tests.tiny_medusa import fresh_heads, make_heads
from tests.tiny_models import V, make_tokenizer, tokens

IDS = torch.tensor(sorted({0, 1, 2, *range(7, V, 2)}))
TREE = StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
SHAPED = {
    "Llama": lambda z: z,
    "Gemma2": lambda z: 0.5 * torch.tanh(z / 0.5),
    "Cohere2": lambda z: 0.25 * z,
    "Granite": lambda z: z / 8.0,
}
"""What each family's config in tiny_models does to the product of states and head, written out once more."""
KINDS = {
    "shared": {},
    "deep": {"num_hidden_layers": 2},
    "own": {"own_heads": True},
    "sequential": {"sequential": True, "num_hidden_layers": 2},
    "reduced": {"ids": IDS},
    "reduced sequential": {"ids": IDS, "sequential": True},
}


@pytest.fixture(scope="module", params=SHAPED)
def target(request):
    return make_target(request.param)


@pytest.fixture(scope="module")
def llama():
    return make_target()


def batch_of(target):
    """Two rows of 14: a prompt, a turn of 5 tokens, a prompt, a turn of 3; and a prompt of 9, a turn of 5."""
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, 3:8] = mask[0, 11:14] = mask[1, 9:] = True
    return make_batch(target, tokens(2, 14), mask)


class Plain:
    """The definition, row by row, from transformers' own forward: its last hidden state has the final norm behind it
    already."""

    def __init__(self, target, draft, batch):
        out = target.model(input_ids=batch.input_ids, output_hidden_states=True)
        self.normed, self.teacher, self.batch = out.hidden_states[-1], out.logits.float(), batch
        self.draft, self.target, self.shape = draft, target, SHAPED[target.name.split()[1]]

    def logits(self, i, b, p):
        """Head i's logits [Vd] at position p of row b."""
        draft, H = self.draft, self.target.hidden_size
        h = self.normed[b, p]
        for j, layer in enumerate(draft.blocks[i].layers):
            x = h / draft.input_rms
            if draft.shape.sequential and j == 0:
                rows = self.target.model.get_input_embeddings().weight[self.batch.input_ids[b, p + 1 : p + 2 + i]]
                x = torch.cat([x, *(row / (row.square().mean() + 1e-6).sqrt() for row in rows)])
            assert x.shape == ((1 + (i + 1) * (draft.shape.sequential and j == 0)) * H,)
            z = layer.weight @ x + layer.bias
            h = h + z * torch.sigmoid(z)
        matrix = draft.lm_heads[i].weight if draft.shape.own_heads else self.target.lm_head_weight[draft.draft_ids]
        return self.shape(matrix @ h)

    def rows(self):
        """(i, b, p) of everything that counts: x[p+1] .. x[p+2+i] are all supervised."""
        mask = self.batch.loss_mask
        B, T = mask.shape
        for i in range(self.draft.steps):
            for b in range(B):
                for p in range(T - 2 - i):
                    if all(bool(mask[b, j]) for j in range(p + 1, p + 3 + i)):
                        yield i, b, p

    def loss(self, name):
        """The objective and, as sums [5, K], rows, loss, hits, alpha, joint."""
        total, sums = 0.0, torch.zeros(5, self.draft.steps)
        ids, alive = self.draft.draft_ids, {}
        for i, b, p in self.rows():
            z, at = self.logits(i, b, p), self.teacher[b, p + 1 + i]
            p_words = at.softmax(-1)[ids]
            place = (ids == at.argmax()).nonzero()[:, 0]
            label = (ids == self.batch.input_ids[b, p + 2 + i]).nonzero()[:, 0]
            log_q = z.log_softmax(-1)
            loss = {
                "forward_kl": lambda q=log_q, w=p_words: (w * (w.log() - q)).sum(),
                "cross_entropy": lambda q=log_q, w=place: -q[w].sum(),
                "next_token": lambda q=log_q, w=label: -q[w].sum(),
            }[name]()
            hit = bool(ids[z.argmax()] == at.argmax())
            alive[b, p] = hit and alive.get((b, p), i == 0)
            alpha = losses.acceptance(p_words[None], z[None])[0]
            sums[:, i] += torch.tensor([1, loss.item(), hit, alpha.item(), alive[b, p]])
            total = total + self.draft.head_decay**i * loss
        return total, sums


def check(target, draft, batch, name="forward_kl"):
    draft.objective = Objective.of(name)
    expected, sums = Plain(target, draft, batch).loss(name)
    found = draft(batch)
    figures = found.figures
    torch.testing.assert_close(figures.rows, sums[0], rtol=0, atol=0)
    for mine, wanted in zip((figures.loss, figures.hits, figures.alpha, figures.joint), sums[1:], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.objective, expected, rtol=1e-4, atol=1e-4)
    weights = list(draft.parameters())
    for mine, wanted in zip(
        torch.autograd.grad(found.objective, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_figures_and_gradients_by_definition(target, kind):
    draft = make_heads(target, **KINDS[kind])
    assert len(list(draft.parameters())) == 3 * 2 * draft.shape.num_hidden_layers + 3 * draft.shape.own_heads
    check(target, draft, batch_of(target))


@pytest.mark.parametrize("name", ["cross_entropy", "next_token"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "reduced"])
def test_hard_labels_are_the_targets_choice_and_the_token_itself(llama, name, ids):
    """next_token: the label of head i at p is x[p+2+i] itself."""
    check(llama, make_heads(llama, ids), batch_of(llama), name)


def rolled_states(loss):
    """The fault: head i trained against the teacher one place further."""
    return lambda states, *rest: loss([state.roll(1, 1) for state in states], *rest)


def shuffled_states(loss):
    """The fault: the heads swapped."""
    return lambda states, *rest: loss(states[::-1], *rest)


@pytest.mark.parametrize("fault", [rolled_states, shuffled_states])
def test_labels_off_by_one_and_shuffled_heads_are_caught(llama, fault, monkeypatch):
    draft, batch = make_heads(llama), batch_of(llama)
    monkeypatch.setattr(medusa, "fused_draft_loss", fault(medusa.fused_draft_loss))
    with pytest.raises(AssertionError):
        check(llama, draft, batch)


def test_shuffled_biases_are_caught(llama, monkeypatch):
    draft, batch = make_heads(llama), batch_of(llama)
    biases = [block.layers[0].bias for block in draft.blocks]
    swapped = {id(a.layers[0]): bias for a, bias in zip(draft.blocks, biases[1:] + biases[:1], strict=True)}
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, swapped.get(id(self), self.bias))
    )
    with pytest.raises(AssertionError):
        check(llama, draft, batch)


def everything(loss_mask, steps):
    return supervised_rows(torch.ones_like(loss_mask), steps)


def past_the_turn(loss_mask, steps):
    return supervised_rows(loss_mask, 1).expand(steps, -1, -1)


@pytest.mark.parametrize("fault", [everything, past_the_turn])
def test_supervised_prompts_and_rows_past_the_turn_are_caught(llama, fault, monkeypatch):
    draft, batch = make_heads(llama), batch_of(llama)
    if fault is past_the_turn:  # Else its last rows have no teacher at all, which the loss asserts.
        batch.loss_mask[:, 11:] = False
    monkeypatch.setattr(medusa, "supervised_rows", fault)
    with pytest.raises(AssertionError):
        check(llama, draft, batch)


def test_nothing_behind_the_mask_matters(llama):
    """Other tokens and states behind what counts (padding, say) leave the objective alone, of sequential heads too."""
    for kind in ("shared", "sequential"):
        draft, batch = make_heads(llama, **KINDS[kind]), batch_of(llama)
        batch.loss_mask[:, 11:] = False  # Row 0: the turn 3..7; row 1: 9 and 10.
        expected = draft(batch)
        assert expected.figures.rows.tolist() == [4 + 1, 3, 2]
        batch.input_ids[:, 11:] = 5
        batch.last_hidden[:, 11:] = 1e4
        torch.testing.assert_close(draft(batch).objective, expected.objective)


def test_batches_without_rows_train_nothing(llama):
    draft = make_heads(llama)
    for length in (1, 2, 3, 12):
        loss = draft(make_batch(llama, tokens(2, length), torch.zeros(2, length, dtype=torch.bool)))
        loss.objective.backward()
        assert loss.objective == 0
        assert loss.figures.rows.tolist() == [0] * 3
    assert all(parameter.grad.eq(0).all() for parameter in draft.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_heads_say_what_the_target_says(target, kind):
    draft = fresh_heads(target, **KINDS[kind])
    batch = batch_of(target)
    normed = draft.teacher.normed(batch.last_hidden)
    expected = target.head()(batch.last_hidden)[..., draft.draft_ids]
    plain = target.model(input_ids=batch.input_ids).logits[..., draft.draft_ids]
    for i in range(3):
        between = draft.embed(batch.input_ids)[:, :, None].expand(-1, -1, i + 1, -1) if draft.shape.sequential else None
        found = draft.logits(i, draft.state(i, normed, between))
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if draft.whole_vocabulary else 1e-6)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    # They learn all the same: SiLU has the slope 1/2 at zero.
    draft(batch).objective.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in draft.blocks[0].layers[0].parameters())


@pytest.mark.parametrize("kind", ["shared", "own", "reduced", "sequential"])
def test_calibration_measures_the_targets_channels_and_export_folds_them(target, kind, tmp_path):
    draft, batch = make_heads(target, **KINDS[kind]), batch_of(target)
    loss = draft.calibrate(batch)
    normed = target.model(input_ids=batch.input_ids, output_hidden_states=True).hidden_states[-1]
    rows = torch.cat([normed[0, 3:8], normed[0, 11:14], normed[1, 9:]])
    torch.testing.assert_close(draft.input_rms, rows.square().mean(0).sqrt(), rtol=1e-4, atol=1e-5)
    _, sums = Plain(target, draft, batch).loss("forward_kl")
    assert loss == pytest.approx(float(sums[1, 0] / sums[0, 0]), rel=1e-4)
    save_draft(draft, target, tmp_path / "draft", torch.float32)
    written = load_draft(tmp_path, target)
    assert written.input_rms.eq(1).all()
    assert torch.equal(written.draft_ids, draft.draft_ids)
    torch.testing.assert_close(written(batch).objective, draft(batch).objective, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_come_back_as_they_were(llama, kind, tmp_path):
    draft = make_heads(llama, **KINDS[kind])
    draft.tree = TREE
    draft.save_pretrained(tmp_path)
    again = load_draft(tmp_path, llama)
    assert again.shape == draft.shape
    assert again.tree == TREE
    assert not again.training
    assert again.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert again.state_dict()[name].dtype == tensor.dtype
    half = load_draft(tmp_path, llama, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.input_rms.dtype == torch.float32
    assert torch.equal(half.draft_ids, draft.draft_ids)


def test_heads_learn_what_they_are_shown(llama):
    """Some updates on one text: each head is right about its own distance, and not about another's."""
    text = tokens(1, 40)
    batch = make_batch(llama, text, torch.ones_like(text, dtype=torch.bool))
    draft = fresh_heads(llama)
    draft.objective = Objective.of("cross_entropy")
    draft.calibrate(batch)
    losses = train(draft, batch, 100)
    assert losses[-1] < 0.2 * losses[0]
    normed = draft.teacher.normed(batch.last_hidden)
    for i in range(3):
        choice = draft.logits(i, draft.state(i, normed, None)).argmax(-1)[0, :36]
        right = [(choice == batch.target_argmax[0, 1 + j : 37 + j]).float().mean() for j in range(3)]
        assert right[i] > 0.9
        assert sorted(right)[-2] < 0.3


# What is refused.


def test_targets_and_trees_that_do_not_fit(llama):
    draft = make_heads(llama)
    for changes, found in (({"hidden_size": 16}, "hidden size 16"), ({"vocab_size": 120}, "vocabulary 120")):
        with pytest.raises(DraftError, match=f"{found}.*hidden size 32"):
            draft.attach(make_target(**changes))
    with pytest.raises(DraftError, match="4 deep, the draft has 3 heads"):
        draft.proposer(llama, StaticTree.from_paths([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]))
    with pytest.raises(DraftError, match="a fixed shape"):
        draft.proposer(llama, DynamicTree(2, 4))
    with pytest.raises(DraftError, match="a narrower tree"):
        make_heads(llama, torch.tensor([4, 9])).proposer(llama, StaticTree.from_paths([[0], [1], [2]]))
    for proposer, deepest in ((draft.proposer(llama), 3), (draft.proposer(llama, StaticTree.from_paths([[0]])), 1)):
        with pytest.raises(GenerateError, match=f"at most {deepest} tokens deep"):
            generate(llama, [[5, 6]], proposer, k=deepest + 1)


def test_the_recipes_choices_make_the_heads(llama):
    assert MedusaConfig.for_target(llama, DraftConfig(), V) == MedusaConfig(32, V, V, 4, 1)
    choices = DraftConfig(num_heads=2, num_hidden_layers=3, sequential=True)
    assert MedusaConfig.for_target(llama, choices, 40) == MedusaConfig(32, V, 40, 2, 3, False, True)
    with pytest.raises(DraftError, match=r"draft\.own_heads: false"):
        MedusaConfig.for_target(llama, DraftConfig(own_heads=True), 40)
    recipe = parse_recipe(
        {
            "method": "medusa",
            "target": "x/y",
            "data": {"train": [{"path": "a"}]},
            "draft": {"num_heads": 2},
            "training": {"step_decay": 0.5, "loss": "cross_entropy"},
        }
    )
    draft = new_draft(recipe, llama, [], IDS, {})
    assert (draft.steps, draft.head_decay, draft.objective.weights) == (2, 0.5, {"cross_entropy": 1.0})
    assert torch.equal(draft.draft_ids, IDS)


def edit(folder, drop=(), **changes):
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in values.items() if key not in drop}))


def edit_tensors(folder, drop=(), **changes):
    path = folder / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if name not in drop} | changes, path)


BROKEN = [
    (lambda f: edit(f, drop=["medusa_fc_bias"]), "medusa_fc_bias is None.*acceptance of nothing"),
    (lambda f: edit(f, medusa_fc_bias=False), "medusa_fc_bias is False"),
    (lambda f: edit(f, num_heads="3"), "num_heads is '3'"),
    (lambda f: edit(f, hidden_size=0), "hidden_size is 0"),
    (lambda f: edit(f, truncated_vocab_size="all"), "truncated_vocab_size is 'all'"),
    (lambda f: edit(f, num_hidden_layers=0), "num_hidden_layers is 0"),
    (lambda f: edit(f, truncated_vocab_size=20), "is no draft vocabulary. Expected 20"),
    (lambda f: edit(f, num_heads=4), r"blocks\.3\.layers\.0\.bias.*Expected 4 heads"),
    (lambda f: edit(f, hidden_size=16), r"blocks\.0.*\(32, 32\) for \(16, 16\)"),
    (lambda f: edit(f, original_lm_head=False), r"lm_heads\.0\.weight"),
    (lambda f: edit_tensors(f, drop=["blocks.1.layers.0.bias"]), r"blocks\.1\.layers\.0\.bias"),
    (lambda f: edit_tensors(f, drop=["token_map"]), "token_map of shape .99,. is no draft vocabulary"),
    (lambda f: edit_tensors(f, token_map=IDS.flip(0)), "rise strictly"),
    (lambda f: edit_tensors(f, token_map=IDS + V), "rise strictly"),
    (lambda f: edit_tensors(f, token_map=torch.tensor(3)), "is no draft vocabulary"),
    (lambda f: edit_tensors(f, extra=torch.zeros(1)), "extra"),
    (lambda f: (f / "model.safetensors").write_bytes(b"no"), "cannot be read"),
    (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    (lambda f: (f / "config.json").write_text("[]"), "Expected an object"),
    (lambda f: (f / "medusa_tree.json").write_text("{}"), "holds no tree"),
    (lambda f: (f / "medusa_tree.json").write_text('{"paths": [[1]]}'), "holds no tree"),
    (lambda f: (f / "medusa_tree.json").write_text('{"paths": 7}'), "holds no tree"),
    (lambda f: (f / "medusa_tree.json").write_text('{"paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}'), "4 deep"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_broken_files_are_named(llama, damage, message, tmp_path):
    save_draft(make_heads(llama, IDS), llama, tmp_path, torch.float32)
    load_draft(tmp_path, llama)
    damage(tmp_path)
    with pytest.raises(DraftError, match=message):
        load_draft(tmp_path, llama)


def test_another_targets_heads_are_refused(llama, tmp_path):
    first = make_target(tokenizer=make_tokenizer())
    save_draft(make_heads(first), first, tmp_path / "draft", torch.float32)
    other = make_target(tokenizer=make_tokenizer(specials=("<pad>", "<eos>", "<bos>", "<|im_end|>")))
    with pytest.raises(DraftError, match="another tokenizer"):
        load_draft(tmp_path, other)
    with pytest.raises(DraftError, match="hidden size 16"):
        load_draft(tmp_path, make_target(hidden_size=16))
