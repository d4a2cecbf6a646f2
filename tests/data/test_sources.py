"""Online, stored and hybrid features train the same draft; what does not fit or is not finite is told by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.data import sources as module
from drafttrain.data.conversations import DataError
from drafttrain.data.files import write_json
from drafttrain.data.prepare import load_prepared, prepare
from drafttrain.data.run_folder import RunError
from drafttrain.data.store import GIB, HybridFeatures, StoredFeatures
from drafttrain.recipe import RecipeError, load_recipe, parse_recipe
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from tests.training.tiny_run import make_target, make_trainer, open_run, settings, text_rows, write_recipe, write_rows

WIDTH = 4 * 32 * 4 + 8


def quiet(message: str) -> None:
    pass


def recipe_of(folder, training=None, data=None, **features):
    values = settings(folder, **{"max_steps": 6, "eval_steps": 3, "save_steps": 100, **(training or {})})
    values["features"] |= features
    values["data"] |= data or {}
    return parse_recipe(values, folder)


def half(folder) -> float:
    """GiB for about half of the training rows."""
    tokens = sum(len(json.loads(line)["text"].split()) for line in (folder / "train.jsonl").read_text().splitlines())
    return tokens * WIDTH / 2 / GIB


def trained(folder, name: str, recipe):
    run = open_run(folder / name, recipe)
    trainer, prepared = make_trainer(recipe, run, make_target(recipe))
    trainer.fit()
    return trainer, prepared, read_log(run.log)


def test_online_store_and_hybrid_give_the_same_losses(tmp_path) -> None:
    online = recipe_of(tmp_path)
    kinds = {"online": online, "store": recipe_of(tmp_path, source="store")}
    kinds["hybrid"] = recipe_of(tmp_path, source="hybrid", max_gib=half(tmp_path))
    logs = {}
    for name, recipe in kinds.items():
        trainer, prepared, logs[name] = trained(tmp_path, name, recipe)
        assert trainer.state.global_step == 6
        if name == "hybrid":
            found = prepared.source(recipe, make_target(recipe), "train")
            assert isinstance(found, HybridFeatures) and 8 < len(found._places) < 16
    assert len(logs["online"]) == len(logs["store"]) == len(logs["hybrid"])
    for rows in zip(*logs.values(), strict=True):
        for key in ("loss", "step_alpha/0", "eval_loss", "grad_norm"):
            if key in rows[0]:
                assert [row[key] for row in rows[1:]] == pytest.approx([rows[0][key]] * 2, rel=2e-5, abs=1e-6), key
    losses = [row["loss"] for row in logs["online"] if "loss" in row]
    assert len(losses) == 6 and len(set(losses)) == 6
    waits = {name: [row["data_wait"] for row in log if "data_wait" in row] for name, log in logs.items()}
    assert waits["online"] == [] and len(waits["store"]) == len(waits["hybrid"]) == 6
    assert all(0 <= wait < 1 for wait in waits["store"])


def test_reading_ahead_gives_the_same_bits(tmp_path) -> None:
    recipe = recipe_of(tmp_path, source="store")
    states = []
    for name in ("ahead", "aside"):
        run = open_run(tmp_path / name, recipe)
        trainer, prepared = make_trainer(recipe, run, make_target(recipe))
        if name == "aside":
            trainer.ahead.over = lambda batches: batches
        trainer.fit()
        states.append(trainer.model.trained_state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_error_in_the_reading_thread_ends_the_run_by_name(tmp_path) -> None:
    recipe = recipe_of(tmp_path, source="store")
    trainer, prepared = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    shard = prepared.folder / "features" / "train" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match="train/shard-00000.safetensors is missing or damaged"):
        trainer.fit()
    prepare(recipe, trainer.run, make_target(recipe), quiet)
    trainer, _ = make_trainer(recipe, trainer.run, make_target(recipe))
    trainer.fit()
    assert trainer.state.global_step == 6


# Hybrid.


def test_hybrid_stores_training_rows_before_validation_rows_and_may_be_given_more(tmp_path) -> None:
    settings(tmp_path)
    whole, said = 2 * half(tmp_path), []
    recipe = recipe_of(tmp_path, source="hybrid", max_gib=half(tmp_path))
    target, run = make_target(recipe), open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, said.append)
    told = [line for line in said if line.startswith("features")]
    assert "of 24 samples; the target is asked for the others" in told[0] and "1 of 6 samples" in told[1]
    folder = run.prepared / "features" / "train"
    first = json.loads((folder / "manifest.json").read_text())["shards"]
    assert sum(sum(shard["lengths"]) for shard in first) * WIDTH / GIB <= half(tmp_path)
    assert sum(path.stat().st_size for path in folder.glob("shard*")) / GIB < 1.2 * half(tmp_path)
    more = recipe_of(tmp_path, source="hybrid", max_gib=whole + 60 * WIDTH / GIB)
    prepared = prepare(more, open_run(tmp_path / "run", more), target, quiet)
    manifest = json.loads((folder / "manifest.json").read_text())["shards"]
    assert manifest[: len(first)] == first and sum(shard["rows"] for shard in manifest) == 24
    room = [len(row["input_ids"]) for row in prepared.rows["validation"]]
    stored = len(prepared.source(more, target, "validation")._places)
    assert sum(room[:stored]) <= 60 < sum(room[: stored + 1])
    less = recipe_of(tmp_path, source="hybrid", max_gib=half(tmp_path) / 2)
    prepare(less, open_run(tmp_path / "run", less), target, quiet)
    assert json.loads((folder / "manifest.json").read_text())["shards"] == manifest


@pytest.mark.parametrize(("features", "found"), [({"source": "hybrid"}, "no max_gib"), ({"max_gib": 2}, "max_gib 2")])
def test_max_gib_is_of_hybrid_alone(tmp_path, features, found) -> None:
    with pytest.raises(RecipeError, match=f"found {found} with source .*expected max_gib with source hybrid alone"):
        recipe_of(tmp_path, **features)


# Bad input.


def test_a_store_that_takes_much_of_the_disk_needs_a_yes(tmp_path, monkeypatch, cli) -> None:
    values = settings(tmp_path)
    values["features"] |= {"source": "store"}
    path, run = write_recipe(tmp_path, values), tmp_path / "run"
    monkeypatch.setattr(module, "MOST_GIB", 1e-6)
    for verb in ("prepare", "train"):
        status, _, err = cli(verb, path, "--output", run)
        assert status == 1 and "more than 1e-06 GiB, which is not written unasked" in err and "prepare --yes" in err
        assert not (run / "prepared" / "features").exists() and (run / "prepared" / "vocab").exists()
    status, out, _ = cli("prepare", path, "--output", run, "--yes")
    assert status == 0 and "GiB in" in out
    assert isinstance(
        load_prepared(load_recipe(path), open_run(run, load_recipe(path)), make_target(load_recipe(path))).source(
            load_recipe(path), make_target(load_recipe(path)), "train"
        ),
        StoredFeatures,
    )


def test_a_sample_over_the_token_budget_is_named_before_features_are_stored(tmp_path) -> None:
    settings(tmp_path)
    write_rows(tmp_path / "train.jsonl", [*text_rows(3, 1), {"text": " ".join(["w1"] * 70)}])
    recipe = recipe_of(tmp_path, {"max_tokens_per_batch": 64}, source="store")
    run = open_run(tmp_path / "run", recipe)
    with pytest.raises(
        DataError, match=r"train.jsonl:4 has 70 tokens, training.max_tokens_per_batch is 64.*max_length"
    ):
        prepare(recipe, run, make_target(recipe), quiet)
    assert not (run.prepared / "features").exists()


def test_features_of_other_layers_or_another_target_are_refused(tmp_path) -> None:
    recipe = recipe_of(tmp_path, source="store")
    target, run = make_target(recipe), open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, quiet)
    other = recipe_of(tmp_path, source="store", layers=[1, 4, 6])
    with pytest.raises(RunError, match="another recipe: features.layers"):
        open_run(run.path, other)
    with pytest.raises(DataError, match=r"made for another layers \(found \[2, 4, 5\]; expected \[1, 4, 6\]\).*Mend"):
        prepare(other, run, target, quiet)
    manifest = run.prepared / "features" / "train" / "manifest.json"
    found = json.loads(manifest.read_text())
    write_json(manifest, {**found, "key": {**found["key"], "target_fingerprint": "feedbeef"}})
    with pytest.raises(DataError, match=r"another target_fingerprint \(found feedbeef; expected "):
        prepare(recipe, run, target, quiet)


def test_a_stale_vocabulary_is_refused(tmp_path) -> None:
    recipe = recipe_of(tmp_path)
    target, run = make_target(recipe), open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, quiet)
    path = run.prepared / "vocab" / "draft_vocab.safetensors"
    ids = load_file(path)["ids"]
    ids[-1] = next(i for i in range(98, 0, -1) if i not in ids.tolist())
    save_file({"ids": ids.sort().values}, path)
    with pytest.raises(DataError, match="draft_vocab.json is stale .*--fresh"):
        prepare(recipe, run, target, quiet)


def broken_target(recipe, word: str):
    """A target whose features are not finite wherever a word stands."""
    target = make_target(recipe)
    with torch.no_grad():
        target.model.get_input_embeddings().weight[target.tokenizer.convert_tokens_to_ids(word)] = float("nan")
    return target


def rows_with_word(folder, places, word: str = "w85") -> None:
    rows = text_rows(24, seed=24)
    for place in places:
        rows[place]["text"] += f" {word} w1"
    write_rows(folder / "train.jsonl", rows)


def test_samples_with_nan_are_named_and_left_out_of_a_store(tmp_path) -> None:
    settings(tmp_path)
    rows_with_word(tmp_path, (2, 11))
    recipe = recipe_of(tmp_path, source="store")
    target, run, said = broken_target(recipe, "w85"), open_run(tmp_path / "run", recipe), []
    for _ in range(2):
        said.clear()
        prepared = prepare(recipe, run, target, said.append)
        [line] = [line for line in said if "skipped" in line]
        assert line.startswith("features (train): skipped 2 of 24 samples, which are not finite: ")
        assert line.endswith(f"{tmp_path}/train.jsonl:3, {tmp_path}/train.jsonl:12")
        assert [row["index"] for row in prepared.rows["train"]] == [i for i in range(24) if i not in (2, 11)]
    assert prepared.statistics["feature_rms"].isfinite().all()
    train(recipe, run, target, quiet)
    log = read_log(run.log)
    assert all("skipped_samples" not in row for row in log) and len([row for row in log if "loss" in row]) == 6


def test_samples_with_nan_are_named_and_skipped_in_training(tmp_path, capfd) -> None:
    settings(tmp_path)
    rows_with_word(tmp_path, (2, 11))
    recipe = recipe_of(tmp_path, {"max_steps": -1, "num_train_epochs": 2, "max_tokens_per_batch": 48})
    run = open_run(tmp_path / "run", recipe)
    train(recipe, run, broken_target(recipe, "w85"), quiet)
    err = capfd.readouterr().err
    for line in (3, 12):
        assert f"skipped {tmp_path}/train.jsonl:{line}: the target's features are not finite there" in err
    losses = [row for row in read_log(run.log) if "loss" in row]
    assert losses[-1]["skipped_samples"] == 2 and all(abs(row["loss"]) < 20 for row in losses)
    weights = load_file(next(run.draft.glob("**/model.safetensors")))
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_target_that_is_broken_everywhere_is_told(tmp_path) -> None:
    recipe = recipe_of(tmp_path, source="store")
    target = make_target(recipe)
    with torch.no_grad():
        target.model.model.layers[0].mlp.down_proj.weight[0] = float("nan")
    with pytest.raises(DataError, match="not finite in 24 of 24 samples, .*train.jsonl:1 among them .*Mend"):
        prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)
    online = recipe_of(tmp_path)
    with pytest.raises(DataError, match="not finite in any of 24 samples"):
        prepare(online, open_run(tmp_path / "online", online), target, quiet)
