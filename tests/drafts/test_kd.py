"""The small distilled draft: its loss against a plain computation, its state, and serving with the trained weights."""

import pytest
import torch
import torch.nn.functional as F

from drafttrain.data.batching import collate
from drafttrain.data.features import OnlineFeatures
from drafttrain.drafts.base import Batch, DraftError, supervised_rows
from drafttrain.drafts.kd import DEPTH, KdDraft
from drafttrain.drafts.loading import load_draft
from drafttrain.export.folder import save_draft
from drafttrain.nn import losses
from drafttrain.nn.objective import Objective
from drafttrain.nn.tree import StaticTree
from drafttrain.specdec.decode import generate
from drafttrain.target import Target
from tests.tiny_drafts import plain
from tests.tiny_models import V, make_model, make_tokenizer
from tests.tiny_students import IDS, make_draft, make_target, trained


def make_batch(target: Target, statistics: bool = False) -> Batch:
    torch.manual_seed(1)
    rows = [
        {"index": i, "input_ids": torch.randint(3, V, (n,)).tolist(), "loss_mask": [0] * 3 + [1] * (n - 3)}
        for i, n in enumerate((12, 9))
    ]
    return OnlineFeatures(target, [], torch.float32, statistics).attach(Batch(**collate(rows)))


def plain_rows(target: Target, draft: KdDraft, batch: Batch):
    """(p, draft logits, x[p+2], argmax of the target) of every row that counts, by two ordinary forwards."""
    teacher = target.model(input_ids=batch.input_ids).logits.float()
    student = draft.student(input_ids=batch.input_ids).logits.float()
    out = []
    for b, n in enumerate(batch.lengths.tolist()):
        for p in range(n - 2):
            if batch.loss_mask[b, p + 1] and batch.loss_mask[b, p + 2]:
                out.append((teacher[b, p + 1], student[b, p + 1], batch.input_ids[b, p + 2]))
    teacher, student, labels = (torch.stack(part) for part in zip(*out, strict=True))
    return teacher.softmax(-1), student, labels, teacher.argmax(-1)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Llama", "Granite"])
@pytest.mark.parametrize("loss", ["forward_kl", "total_variation", "next_token"])
def test_the_loss_is_that_of_two_ordinary_forwards(family, loss):
    target = make_target(family)
    draft = make_draft(target)
    draft.objective = Objective.of(loss)
    batch = make_batch(target)
    p, logits, labels, _ = plain_rows(target, draft, batch)
    expected = {
        "forward_kl": lambda: losses.forward_kl(p, logits),
        "total_variation": lambda: losses.total_variation(p, logits),
        "next_token": lambda: torch.nn.functional.cross_entropy(logits, labels, reduction="none"),
    }[loss]()
    found = draft(batch)
    assert found.figures.rows[0] == len(labels)
    torch.testing.assert_close(found.objective, expected.sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.figures.loss[0], expected.sum(), rtol=1e-4, atol=1e-4)
    found.objective.backward()
    gradients = {n: g.grad.clone() for n, g in draft.student.named_parameters() if g.grad is not None}
    draft.zero_grad()
    expected.sum().backward()
    for name, parameter in draft.student.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-3, atol=1e-4)
    assert all(not name.endswith("embed_tokens.weight") for name in gradients), "a pruned student's table is frozen"


def test_figures_are_counted_over_consecutive_positions():
    target = make_target()
    draft, batch = make_draft(target), make_batch(target)
    teacher = target.model(input_ids=batch.input_ids).logits.argmax(-1)
    student = draft.student(input_ids=batch.input_ids).logits.argmax(-1)
    figures = draft(batch).figures
    valid = supervised_rows(batch.loss_mask, DEPTH)
    for k in range(DEPTH):
        rows = valid[k].nonzero().tolist()
        same = [[bool(teacher[b, p + 1 + j] == student[b, p + 1 + j]) for j in range(k + 1)] for b, p in rows]
        assert figures.rows[k] == len(rows)
        assert figures.hits[k] == sum(hits[k] for hits in same)
        assert figures.joint[k] == sum(all(hits) for hits in same)
    alpha = torch.minimum(plain_rows(target, draft, batch)[0], plain_rows(target, draft, batch)[1].softmax(-1)).sum()
    torch.testing.assert_close(figures.alpha[0], alpha, rtol=1e-4, atol=1e-4)


def test_the_target_itself_is_always_hit():
    target = make_target()
    figures = make_draft(target, layers=range(8))(make_batch(target)).figures
    assert figures.hits.tolist() == figures.joint.tolist() == figures.rows.tolist()
    assert figures.loss[0].abs() < 1e-3


def test_a_smaller_vocabulary_counts_words_outside_it_as_misses():
    target = make_target()
    draft, batch = make_draft(target, IDS), make_batch(target, statistics=True)
    p, logits, _, argmax = plain_rows(target, draft, batch)
    known = torch.isin(argmax, IDS)
    assert not known.all()
    choice = IDS[logits[:, IDS].argmax(-1)]
    found = draft(batch)
    assert found.figures.hits[0] == ((choice == argmax) & known).sum()
    expected = losses.forward_kl(p[:, IDS], logits[:, IDS]).sum()
    torch.testing.assert_close(found.objective, expected, rtol=1e-4, atol=1e-4)


def test_masked_positions_have_no_gradient():
    """Tokens behind the last supervised one, and the prompt's own predictions, do not train."""
    target = make_target()
    draft = make_draft(target)
    batch = make_batch(target)
    first = draft(batch)
    first.objective.backward()
    grads = [p.grad.clone() for p in draft.trained_state().values()]
    rows = supervised_rows(batch.loss_mask, 1)[0]
    assert rows.any() and not rows.all() and all(grad.abs().sum() > 0 for grad in grads)
    # The teacher of other rows is never asked, and tokens that only such rows have read change nothing.
    batch.last_hidden[~F.pad(rows[:, :-1], (1, 0))] = float("nan")
    batch.input_ids[1, 9:] = 7
    draft.zero_grad()
    draft(batch).objective.backward()
    for found, expected in zip(draft.trained_state().values(), grads, strict=True):
        torch.testing.assert_close(found.grad, expected)


def test_state_is_what_trains_alone():
    target = make_target()
    draft = make_draft(target)
    state = {name: tensor.clone() for name, tensor in draft.trained_state().items()}
    assert not any("embed" in name or "lm_head" in name for name in state)
    with torch.no_grad():
        for parameter in draft.trained_state().values():
            parameter.add_(1)
    draft.load_trained_state(state)
    assert all(torch.equal(draft.trained_state()[name], tensor) for name, tensor in state.items())
    with pytest.raises(DraftError, match="unlike this student"):
        draft.load_trained_state({"other": torch.zeros(1)})


def test_the_model_that_generates_follows_the_weights():
    target = make_target()
    draft = make_draft(target)
    small = draft.small_target()
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        draft.student.model.norm.weight.mul_(-1)
        expected = draft.student(input_ids=tokens).logits
        assert draft.small_target() is small
        torch.testing.assert_close(small.model(input_ids=tokens).logits, expected)
    assert small.embed_weight.data_ptr() == target.embed_weight.data_ptr()
    assert not any(parameter.requires_grad for parameter in small.model.parameters())
    assert draft.student.model.norm.weight.requires_grad


@pytest.mark.parametrize("ids", [None, IDS])
def test_greedy_output_is_the_targets_own(ids):
    target = make_target()
    draft = make_draft(target, ids, layers=(0, 1, 2, 3, 4, 5, 7))
    prompts = [[5, 6, 7, 8], [9, 10]]
    decoded = generate(target, prompts, draft.proposer(target), k=3, max_new_tokens=20, stop_ids=())
    assert [g.tokens for g in decoded.generations] == plain(target, prompts, 20)
    assert decoded.counts.accepted > 0


def test_trees_are_refused():
    target = make_target()
    with pytest.raises(DraftError, match="chains only"):
        make_draft(target).proposer(target, StaticTree.from_paths([[0], [1]]))


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("settings", [{}, {"lora": {"r": 2}}, {"train_embeddings": True}])
def test_what_is_saved_drafts_as_it_was_trained(tmp_path, ids, settings):
    target = make_target()
    draft = trained(target, ids, **settings)
    save_draft(draft, target, tmp_path / "draft", torch.float32)
    again = load_draft(tmp_path, target)
    assert isinstance(again, KdDraft)
    assert again.draft_ids.tolist() == draft.draft_ids.tolist()
    prompts = [[5, 6, 7, 8], [9, 10]]
    found = [
        generate(target, prompts, one.proposer(target), k=3, max_new_tokens=12, stop_ids=()).counts
        for one in (draft, again)
    ]
    assert found[0] == found[1]
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(
            again.student(input_ids=tokens).logits, draft.student(input_ids=tokens).logits, rtol=1e-4, atol=1e-4
        )


def test_a_model_with_other_words_is_refused(tmp_path):
    target = make_target()
    save_draft(make_draft(target), target, tmp_path / "draft", torch.float32)
    (tmp_path / "draft" / "drafttrain.json").unlink()  # As any model from elsewhere.
    other = Target.from_model(make_model("Qwen3"), make_tokenizer(specials=("<pad>", "<eos>", "<bos>", "<|im_end|>")))
    with pytest.raises(DraftError, match="id 1 is '<bos>' in the draft and '<eos>' in the target"):
        load_draft(tmp_path / "draft", other)
