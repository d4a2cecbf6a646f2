"""Heads and a target tuned together: the start changes nothing, gradients and the anchor against plain forwards, and
the files, which belong to the tuned target alone.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafts import DraftError, load_draft
from drafttrain.drafts.loading import new_draft
from drafttrain.drafts.medusa2 import Medusa2Draft, last_hidden
from drafttrain.export.base import ExportError
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.nn import losses
from drafttrain.nn.objective import Pair, forward_kl
from drafttrain.nn.teacher import DenseBlock, DraftWords
from drafttrain.recipe import LoraConfig, TrainingConfig, parse_recipe
from drafttrain.specdec.decode import generate
from drafttrain.target import Target, load_target
from tests.tiny_drafts import make_batch, make_target, plain
from tests.tiny_medusa import fresh_heads, make_heads
from tests.tiny_models import V, make_model, make_tokenizer, save, tokens

IDS = torch.tensor(sorted({0, 1, 2, *range(7, V, 2)}))
FAMILIES = ["Llama", "Gemma2", "Qwen3", "Granite"]


def build(target, ids=None, heads=None, lora=None, **training) -> Medusa2Draft:
    settings = LoraConfig(r=4, alpha=8, **lora or {})
    return Medusa2Draft.build(heads or make_heads(target, ids), target, settings, TrainingConfig(**training))


def moved(draft: Medusa2Draft, size: float = 0.05) -> Medusa2Draft:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in draft.adapters().values():
            parameter.add_(torch.randn_like(parameter) * size)
    return draft


def batch_of(target):
    """Two rows of 14: a prompt and a turn of 5, a prompt and a turn of 3; all but the first token."""
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, 3:8] = mask[0, 11:14] = mask[1, 1:] = True
    return make_batch(target, tokens(2, 14), mask, layers=[1])


def tuned_as_target(draft, target) -> Target:
    return Target.from_model(draft.plain_model(torch.float32), target.tokenizer, "tuned")


def spoken(target, model, batch):
    """Logits [n, V] of the unchanged and of the tuned model wherever the next token is supervised, one by one."""
    both = target.model(input_ids=batch.input_ids).logits, model(input_ids=batch.input_ids).logits
    places = [(b, t) for b in range(2) for t in range(13) if batch.loss_mask[b, t + 1]]
    return tuple(torch.stack([logits[place] for place in places]).float() for logits in both)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ids", [None, IDS])
def test_at_the_start_it_is_medusa_1(family, ids) -> None:
    target = make_target(family)
    heads, batch = make_heads(target, ids), batch_of(target)
    expected, found = heads(batch), build(target, heads=heads)(batch)
    for name in ("rows", "hits", "joint"):
        assert torch.equal(getattr(found.figures, name), getattr(expected.figures, name))
    torch.testing.assert_close(found.figures.loss, expected.figures.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.figures.alpha, expected.figures.alpha)
    torch.testing.assert_close(found.objective, expected.objective, rtol=1e-5, atol=1e-4)
    asked, divergence, same = found.figures.drift.tolist()
    assert asked == same == 5 + 3 + 13 and divergence == pytest.approx(0, abs=1e-4)
    assert expected.figures.drift.tolist() == [0, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_anchor_is_the_divergence_of_two_ordinary_forwards(family) -> None:
    target = make_target(family)
    draft, batch = moved(build(target, anchor=0.0)), batch_of(target)
    unchanged, tuned = spoken(target, draft.model, batch)
    divergence = losses.forward_kl(unchanged.softmax(-1), tuned).sum()
    same = int((unchanged.argmax(-1) == tuned.argmax(-1)).sum())
    assert divergence > 1e-3 * len(tuned) and same < len(tuned)
    draft.zero_grad()
    without = draft(batch)
    without.objective.backward()
    before = {name: p.grad.clone() for name, p in draft.adapters().items()}
    torch.testing.assert_close(without.figures.drift, torch.tensor([len(tuned), divergence.item(), same]))
    draft.anchor = 2.5
    draft.zero_grad()
    found = draft(batch)
    torch.testing.assert_close(found.objective, without.objective + 2.5 * divergence, rtol=1e-5, atol=1e-4)
    found.objective.backward()
    after = {name: p.grad.clone() for name, p in draft.adapters().items()}
    draft.zero_grad()
    divergence.backward()
    for name, parameter in draft.adapters().items():
        torch.testing.assert_close(after[name] - before[name], 2.5 * parameter.grad, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("ids", [None, IDS])
def test_heads_read_and_predict_the_tuned_model(ids) -> None:
    """Their figures are those of the same heads as Medusa-1 on the tuned model as an ordinary target."""
    target = make_target("Gemma2")
    draft, batch = moved(build(target, ids)), batch_of(target)
    tuned = tuned_as_target(draft, target)
    expected = draft.heads(make_batch(tuned, batch.input_ids, batch.loss_mask, [1]))
    other = draft.heads(batch)
    found = draft(batch).figures
    for name in ("rows", "loss", "hits", "alpha", "joint"):
        torch.testing.assert_close(getattr(found, name), getattr(expected.figures, name), rtol=1e-4, atol=1e-4)
    assert not torch.equal(found.hits, other.figures.hits), "the unchanged target is to be told from the tuned one"


def test_gradients_reach_heads_and_adapters_and_nothing_of_the_target() -> None:
    target = make_target("Qwen3")
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    draft, batch = moved(build(target, anchor=0.0)), batch_of(target)
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert all(name.startswith("heads.") or ".lora_" in name for name in trained)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in draft.adapters()} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=0.01)
    draft(batch).objective.backward()
    for name, parameter in draft.named_parameters():
        reached = parameter.grad is not None and bool(parameter.grad.any())
        assert reached == (name in trained), name
    optimizer.step()
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {p.data_ptr() for p in target.model.parameters()} <= {p.data_ptr() for p in draft.model.parameters()}
    assert draft.trained_state().keys() == trained | {"heads.input_rms", "heads.draft_ids"}


def test_the_anchor_holds_on_to_the_target() -> None:
    target = make_target(num_hidden_layers=2)
    batch = batch_of(target)
    drifts = []
    for anchor in (0.0, 10.0):
        draft = build(target, heads=fresh_heads(target), anchor=anchor)
        optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=0.01)
        first = float(draft(batch).figures.loss[0])
        for _ in range(30):
            optimizer.zero_grad()
            draft(batch).objective.backward()
            optimizer.step()
        figures = draft(batch).figures
        assert figures.loss[0] < 0.9 * first
        drifts.append(float(figures.drift[1] / figures.drift[0]))
    assert drifts[1] < 0.2 * drifts[0], drifts


def test_the_tuned_numbers_are_exact_under_autocast() -> None:
    target = make_target()
    draft, batch = build(target), batch_of(target)
    with torch.autocast("cpu", torch.bfloat16):
        drift = draft(batch).figures.drift
    assert drift[0] == drift[2] and drift[1].abs() < 1e-4


def test_a_large_vocabulary_does_not_pass_for_a_drift() -> None:
    torch.manual_seed(0)
    z = torch.randn(8, 262144) * 3 - 10
    z[:, :20] += 18
    words = DraftWords(z)
    value, _ = forward_kl(Pair(DenseBlock(z, None).words(words), words))
    assert value.abs().max() < 2e-5


def test_groups_are_what_the_recipe_says() -> None:
    target = make_target()
    (group,) = build(target).parameter_groups()
    assert (group.scale, group.first_step) == (pytest.approx(0.1), 100)
    settings = {"learning_rate": 2e-3, "target_learning_rate": 5e-4, "warmup_heads_steps": 7}
    draft = build(target, **settings)
    (group,) = draft.parameter_groups()
    assert (group.scale, group.first_step) == (pytest.approx(0.25), 7)
    assert {id(p) for p in group.parameters} == {id(p) for p in draft.model.parameters() if p.requires_grad}


def test_the_masters_come_back_through_a_checkpoint() -> None:
    target = make_target()
    draft, batch = moved(build(target)), batch_of(target)
    state = {name: tensor.clone() for name, tensor in draft.trained_state().items()}
    fresh = build(target)
    assert not torch.equal(fresh(batch).objective, draft(batch).objective)
    fresh.load_trained_state(state)
    assert torch.equal(fresh(batch).objective, draft(batch).objective)
    with pytest.raises(DraftError, match="unlike these heads and adapters"):
        fresh.load_trained_state({name: t for name, t in state.items() if ".lora_A." not in name})


def test_what_cannot_be_tuned_is_refused() -> None:
    target = make_target()
    with pytest.raises(DraftError, match="target_modules names nowhere"):
        build(target, lora={"target_modules": ["nowhere"]})
    model = make_model("Llama")
    target = Target.from_model(model)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(DraftError, match=r"up_proj.weight is stored as int8"):
        build(target)
    target = make_target()
    target.spread = True
    with pytest.raises(DraftError, match="spread over several devices"):
        build(target)


# Files.


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(unchanged target, draft, its folder, the tuned target as loaded from there)."""
    home = tmp_path_factory.mktemp("written")
    folder = save(home / "target", make_model("Gemma2", max_position_embeddings=256))
    settings = {"eos_token_id": [2, 3], "temperature": 0.5, "do_sample": False}  # Which transformers would not write.
    (folder / "generation_config.json").write_text(json.dumps(settings))
    target = load_target(str(folder), dtype="float32")
    draft = moved(build(target))
    validation = {"eval_target_drift": 0.0625, "eval_target_same_choice": 0.75}
    save_draft(draft, target, home / "draft", torch.float32, validation=validation)
    return target, draft, home / "draft", load_target(str(home / "draft" / "target"), dtype="float32")


def test_the_written_target_has_the_tuned_logits(written) -> None:
    target, draft, folder, tuned = written
    ids = tokens()
    expected = draft.model(input_ids=ids).logits
    found = tuned.model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - target.model(input_ids=ids).logits).abs().max() > 1e-2
    assert tuned.stop_ids == target.stop_ids and 3 in tuned.stop_ids
    assert tuned.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert type(tuned.model) is type(target.model)
    assert not any("lora" in name for name in load_file(folder / "target" / "model.safetensors"))
    read = (target.folder / "generation_config.json", folder / "target" / "generation_config.json")
    assert read[0].read_bytes() == read[1].read_bytes()


def test_the_written_heads_draft_for_the_tuned_target_as_trained(written) -> None:
    target, draft, folder, tuned = written
    loaded = load_draft(folder, tuned)
    batch = batch_of(tuned)
    found, expected = loaded(batch).figures, draft(batch_of(target)).figures
    torch.testing.assert_close(found.hits, expected.hits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=1e-3)
    prompts = [tokens()[0].tolist()]
    run = generate(tuned, prompts, max_new_tokens=12, stop_ids=(), proposer=loaded.proposer(tuned), k=3)
    assert [g.tokens for g in run.generations] == plain(tuned, prompts, 12)
    masters = load_file(folder / "master" / "adapters.safetensors")
    assert all(torch.equal(masters[name], p) for name, p in draft.adapters().items())


def test_another_target_than_the_tuned_one_is_refused(written) -> None:
    target, _, folder, _ = written
    with pytest.raises(DraftError, match=r"found the unchanged .*Mend: --target .*draft/target"):
        load_draft(folder, target)
    stranger = make_target("Gemma2", tokenizer=make_tokenizer())
    with pytest.raises(DraftError, match=r"found tiny Gemma2\. Expected that very tuned model"):
        load_draft(folder, stranger)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_export_still_says_whose_heads_it_holds(written, tmp_path, dtype) -> None:
    target, _, folder, tuned = written
    export_draft(folder, tuned, tmp_path / "out", dtype)
    assert not (tmp_path / "out" / "target").exists()
    assert load_draft(tmp_path / "out", tuned).shape.num_heads == 3
    with pytest.raises(DraftError, match=r"found the unchanged .*Mend: --target RUN/draft/target"):
        load_draft(tmp_path / "out", target)


def test_heads_whose_adapters_never_moved_are_the_unchanged_targets(tmp_path) -> None:
    target = make_target(tokenizer=make_tokenizer())
    save_draft(build(target), target, tmp_path / "draft", torch.float32)
    assert not (tmp_path / "draft" / "target").exists()
    assert load_draft(tmp_path / "draft", target).shape.num_heads == 3


def test_tuned_weights_that_are_not_finite_are_not_written(tmp_path) -> None:
    target = make_target(tokenizer=make_tokenizer())
    draft = moved(build(target))
    with torch.no_grad():
        next(p for name, p in draft.adapters().items() if ".lora_B." in name)[0, 0] = float("inf")
    with pytest.raises(ExportError, match="not finite"):
        save_draft(draft, target, tmp_path / "draft", torch.float32)
    assert not (tmp_path / "draft").exists()


def test_a_recipe_with_adapters_makes_it() -> None:
    target = make_target()
    values = {
        "method": "medusa",
        "target": "tiny",
        "data": {"train": [{"path": "x.jsonl"}], "draft_vocab": None},
        "draft": {"num_heads": 2, "lora": {"r": 2}},
        "training": {"loss": "cross_entropy", "step_decay": 0.5, "anchor": 3.0, "warmup_heads_steps": 4},
    }
    draft = new_draft(parse_recipe(values), target, [], torch.arange(V), {})
    assert isinstance(draft, Medusa2Draft) and draft.steps == draft.max_k == 2 and draft.method == "medusa"
    assert draft.heads.head_decay == 0.5 and draft.objective.weights == {"cross_entropy": 1.0}
    assert (draft.anchor, draft.first_step) == (3.0, 4)
    values["draft"] = {"num_heads": 2}
    values["training"] = {}
    assert not isinstance(new_draft(parse_recipe(values), target, [], torch.arange(V), {}), Medusa2Draft)


def test_last_hidden_lies_in_front_of_the_norm() -> None:
    target = make_target()
    ids = tokens()
    expected = target.hidden_states(ids, None, [target.num_layers])[target.num_layers]
    assert torch.equal(last_hidden(target.model, ids), expected)
