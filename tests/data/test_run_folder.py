"""A run folder belongs to one recipe and one process."""

import fcntl

import pytest

from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.recipe import parse_recipe

SETTINGS = {"method": "eagle3", "target": "a/b", "data": {"train": [{"path": "/data.jsonl"}]}}


def recipe(**sections):
    return parse_recipe({**SETTINGS, **sections})


def begun(path) -> RunFolder:
    run = RunFolder(path)
    run.claim(recipe())
    run.log.write_text("")
    return run


def test_claim_writes_the_whole_recipe(tmp_path) -> None:
    run = RunFolder(tmp_path / "deep" / "run")
    run.claim(recipe(training={"learning_rate": 2e-4}))
    assert run.recipe().training.learning_rate == 2e-4
    assert RunFolder.find(run.path).recipe().data.train[0].path == "/data.jsonl"


def test_the_same_recipe_takes_the_folder_again(tmp_path) -> None:
    run = begun(tmp_path / "run")
    run.claim(recipe())


@pytest.mark.parametrize(
    "sections",
    [
        {"evaluation": {"k": [3]}},
        {"export": {"engine": "sglang"}},
        {"training": {"max_minutes": 5}},
        {"training": {"max_steps": 5, "num_train_epochs": 9}},
    ],
)
def test_what_may_change_between_two_commands(tmp_path, sections) -> None:
    run = begun(tmp_path / "run")
    run.claim(recipe(**sections))
    assert run.recipe() != recipe()


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"target": "a/c"}, "target.name_or_path: 'a/b' -> 'a/c'"),
        ({"training": {"ttt_steps": 3}}, "training.ttt_steps: 7 -> 3"),
        ({"training": {"max_tokens_per_batch": 64}}, "training.max_tokens_per_batch"),
        ({"data": {"train": [{"path": "/other.jsonl"}]}}, "data.train.0.path"),
        ({"draft": {"num_attention_heads": 2}}, "draft.num_attention_heads"),
        ({"features": {"layers": [1, 2]}}, "features.layers"),
    ],
)
def test_another_recipe_is_refused_by_name(tmp_path, sections, named) -> None:
    run = begun(tmp_path / "run")
    before = run.recipe_file.read_bytes()
    with pytest.raises(RunError, match="belongs to another recipe") as caught:
        run.claim(recipe(**sections))
    assert named in str(caught.value) and "Mend:" in str(caught.value)
    assert run.recipe_file.read_bytes() == before


def test_all_of_training_may_change_until_it_has_begun(tmp_path) -> None:
    run = begun(tmp_path / "run")
    run.log.unlink()
    (run.prepared / "train").mkdir(parents=True)
    run.claim(recipe(training={"max_tokens_per_batch": 64}))
    with pytest.raises(RunError, match="features.layers"):
        run.claim(recipe(features={"layers": [1, 2]}))


def test_a_folder_where_nothing_was_begun_takes_a_mended_recipe(tmp_path) -> None:
    run = RunFolder(tmp_path)
    run.claim(recipe())
    with run.lock():
        run.prepared.mkdir()
    run.claim(recipe(target="a/c"))
    assert run.recipe().target.name_or_path == "a/c"
    (run.prepared / "train").mkdir()
    with pytest.raises(RunError, match="another recipe"):
        run.claim(recipe())


def test_fresh_wants_an_empty_folder(tmp_path) -> None:
    RunFolder(tmp_path / "new").claim(recipe(), fresh=True)
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").claim(recipe(), fresh=True)
    run = begun(tmp_path / "run")
    with pytest.raises(RunError, match=r"is not empty \(log.jsonl, recipe.yaml\), and --fresh"):
        run.claim(recipe(), fresh=True)


def test_folders_that_are_no_runs(tmp_path) -> None:
    (tmp_path / "photo.jpg").write_text("")
    with pytest.raises(RunError, match=r"holds other files \(photo.jpg\) and no recipe.yaml"):
        RunFolder(tmp_path).claim(recipe())
    with pytest.raises(RunError, match="is a file, expected a folder"):
        RunFolder(tmp_path / "photo.jpg").claim(recipe())
    with pytest.raises(RunError, match="is no run folder"):
        RunFolder.find(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_the_lock_keeps_a_second_holder_out_and_ends(tmp_path) -> None:
    run = RunFolder(tmp_path)
    with run.lock():
        with pytest.raises(RunError, match="in use by another process"), run.lock():
            pass
        with open(tmp_path / "lock") as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    with run.lock():
        pass


def test_checkpoints_are_whole_ones_in_order(tmp_path) -> None:
    run = RunFolder(tmp_path)
    assert run.checkpoints() == []
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-100", "checkpoint-x", ".saving", "checkpoint-5.tmp"):
        (tmp_path / name).mkdir()
    assert [path.name for path in run.checkpoints()] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    run.rotate(2)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-10", "checkpoint-100"]
    run.rotate(5)
    assert len(run.checkpoints()) == 2
    assert (tmp_path / "checkpoint-x").exists()
