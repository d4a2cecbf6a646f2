"""prepare: what it leaves, that it is not done twice, and that nothing of other data or of another target is reused."""

import json

import pytest
import torch

from drafttrain.data import prepare as module
from drafttrain.data.conversations import Conversation, DataError
from drafttrain.data.features import OnlineFeatures
from drafttrain.data.prepare import conversation_prompt, feature_layers, load_prepared, prepare
from drafttrain.data.run_folder import RunFolder
from drafttrain.data.store import StoredFeatures
from drafttrain.recipe import parse_recipe
from drafttrain.target import TargetError
from tests.training.tiny_run import make_recipe, make_target, open_run, prompt_rows, settings, text_rows, write_rows


def quiet(message: str) -> None:
    pass


def stored(folder, **data):
    values = settings(folder)
    values["features"] = {"source": "store", "dtype": "float32"}
    values["data"] |= data
    return parse_recipe(values, folder)


def content(folder) -> dict:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def test_what_prepare_leaves(tmp_path) -> None:
    recipe = stored(tmp_path)
    target = make_target(recipe)
    run = open_run(tmp_path / "run", recipe)
    said = []
    prepared = prepare(recipe, run, target, said.append)
    assert {path.name for path in run.prepared.iterdir()} == {
        "manifest.json",
        "train",
        "validation",
        "vocab",
        "features",
        "statistics-2-4-5.safetensors",
    }
    assert {split: len(rows) for split, rows in prepared.rows.items()} == {"train": 24, "validation": 6}
    texts = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for index, (row, text) in enumerate(zip(prepared.rows["train"], texts, strict=True)):
        assert row["index"] == index and row["input_ids"] == target.tokenizer(text)["input_ids"]
    assert len(prepared.vocab.ids) == 60 and set(target.stop_ids) <= set(prepared.vocab.ids.tolist())
    assert prepared.layers == [2, 4, 5]
    assert prepared.statistics["feature_rms"].shape == (96,) and prepared.statistics["final_rms"].shape == (32,)
    assert isinstance(prepared.source(recipe, target, "train"), StoredFeatures)
    assert isinstance(prepared.source(make_recipe(tmp_path), target, "train"), OnlineFeatures)
    text = "\n".join(said)
    tokens = sum(len(row["input_ids"]) for row in prepared.rows["train"])
    assert f"train: 24 conversations, {tokens} tokens" in text and f"{tokens} tokens x 520 bytes" in text
    assert prepared.manifest["coverage"]["train"] == pytest.approx(prepared.vocab.coverage)


def test_a_second_prepare_changes_nothing(tmp_path) -> None:
    recipe = stored(tmp_path)
    target = make_target(recipe)
    run = open_run(tmp_path / "run", recipe)
    first = prepare(recipe, run, target, quiet)
    before = content(run.path)
    second = load_prepared(recipe, run, target)
    assert content(run.path) == before
    assert second.rows == first.rows and torch.equal(second.vocab.ids, first.vocab.ids)
    assert all(torch.equal(second.statistics[name], first.statistics[name]) for name in first.statistics)


def test_regenerated_answers_become_the_rows(tmp_path) -> None:
    values = settings(tmp_path)
    write_rows(tmp_path / "train.jsonl", prompt_rows(5, 1))
    write_rows(tmp_path / "validation.jsonl", [{"prompt": "w1 w2", "completion": " w3 w4 w5"}])
    values["data"] |= {"regenerate": {"max_new_tokens": 6, "splits": ["train"]}}
    recipe = parse_recipe(values, tmp_path)
    target = make_target(recipe)
    prepared = prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)
    for row in prepared.rows["train"]:
        ids, count = torch.tensor([row["input_ids"]]), sum(row["loss_mask"])
        assert 1 <= count <= 6
        logits = target.model(ids).logits[0]
        assert logits[-count - 1 : -1].argmax(-1).tolist() == row["input_ids"][-count:]
    (given,) = prepared.rows["validation"]
    said = [t for t, m in zip(given["input_ids"], given["loss_mask"], strict=True) if m]
    assert target.tokenizer.convert_ids_to_tokens(said) == ["w3", "w4", "w5", "<eos>"]


@pytest.mark.parametrize("point", ["_vocab", "_sources", "_statistics"])
def test_an_interrupted_prepare_is_finished_by_the_next(tmp_path, monkeypatch, point) -> None:
    recipe = stored(tmp_path)
    target = make_target(recipe)
    whole = open_run(tmp_path / "whole", recipe)
    prepare(recipe, whole, target, quiet)
    run = open_run(tmp_path / "run", recipe)

    def stop(*args) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, point, stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, run, target, quiet)
    # Data that change now cannot mix with what is there.
    data = (tmp_path / "train.jsonl").read_bytes()
    write_rows(tmp_path / "train.jsonl", text_rows(24, seed=99))
    with pytest.raises(DataError, match="changed since"):
        prepare(recipe, run, target, quiet)
    (tmp_path / "train.jsonl").write_bytes(data)
    prepare(recipe, run, target, quiet)
    a, b = content(whole.prepared), content(run.prepared)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name] and name.name not in ("state.json", "manifest.json")] == []
    assert json.loads(a[next(n for n in a if str(n) == "manifest.json")]) == json.loads(
        b[next(n for n in b if str(n) == "manifest.json")]
    )


def test_other_data_settings_or_another_target_are_refused(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    target = make_target(recipe)
    run = open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, quiet)
    for changed in (stored(tmp_path, max_length=16), stored(tmp_path, draft_vocab=50), stored(tmp_path, chat="none")):
        with pytest.raises(DataError, match="prepared for .* with other data, tokenizer, template or settings"):
            prepare(changed, run, target, quiet)
    other = make_target(recipe)
    other.tokenizer.chat_template = "{{ messages }}"
    other.tokenizer.save_pretrained(tmp_path / "target")
    with pytest.raises(DataError, match="with other data, tokenizer, template or settings"):
        prepare(recipe, run, make_target(recipe), quiet)


def test_test_prompts_may_change(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    target = make_target(recipe)
    run = open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, quiet)
    prepare(stored(tmp_path, test=[]), run, target, quiet)


def test_nothing_prepared(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    run = RunFolder(tmp_path / "run")
    with pytest.raises(DataError, match="nothing is prepared; run `drafttrain prepare` first"):
        load_prepared(recipe, run, make_target(recipe))
    assert not run.path.exists()


def test_truncated_away_and_dropped_rows_are_told(tmp_path) -> None:
    values = settings(tmp_path)
    rows = [{"prompt": "w1 w2 w3 w4 w5 w6 w7", "completion": "w8"}, {"prompt": "w1", "completion": "w2 w3 w4"}]
    write_rows(tmp_path / "train.jsonl", rows)
    values["data"] |= {"max_length": 6}
    recipe = parse_recipe(values, tmp_path)
    said = []
    prepared = prepare(recipe, open_run(tmp_path / "run", recipe), make_target(recipe), said.append)
    assert len(prepared.rows["train"]) == 1
    assert "dropped 1: no supervised token within max_length" in said[0]


def test_feature_layers_of_recipe_and_default(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    target = make_target(recipe)
    assert feature_layers(recipe, target) == [2, 4, 5]
    values = settings(tmp_path)
    values["features"]["layers"] = [1, 6]
    assert feature_layers(parse_recipe(values, tmp_path), target) == [1, 6]
    values["features"]["layers"] = [1, 9]
    with pytest.raises(TargetError):
        feature_layers(parse_recipe(values, tmp_path), target)


def test_the_prompt_of_a_conversation(tmp_path) -> None:
    target = make_target(make_recipe(tmp_path))
    prompt = Conversation(prompt="w1 w2", completion="w3", source="f:1")
    assert conversation_prompt(prompt, target, "none") == target.tokenizer("w1 w2")["input_ids"]
    target.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content + ' <|im_end|> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w9 ' }}{% endif %}"
    )
    turns = tuple(
        {"role": role, "content": text} for role, text in (("user", "w1"), ("assistant", "w2"), ("user", "w3"))
    )
    ids = conversation_prompt(Conversation(messages=turns, source="f:1"), target, "auto")
    assert target.tokenizer.convert_ids_to_tokens(ids) == ["w1", "<|im_end|>", "w9"]
    with pytest.raises(DataError, match="f:3: found no prompt"):
        conversation_prompt(Conversation(text="w1", source="f:3"), target, "auto")


def test_an_edited_data_file_is_noticed_and_a_missing_one_is_not_needed(tmp_path) -> None:
    recipe = stored(tmp_path)
    target = make_target(recipe)
    run = open_run(tmp_path / "run", recipe)
    before = prepare(recipe, run, target, quiet)
    path = tmp_path / "train.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:] + lines[:1]))  # the same rows and size, another order
    with pytest.raises(DataError, match="train.jsonl changed since"):
        prepare(recipe, run, target, quiet)
    path.unlink()
    assert load_prepared(recipe, run, target).rows == before.rows
