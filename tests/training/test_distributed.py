"""Two processes under each accelerate configuration train as one with twice the accumulation, from its checkpoint on
and up to one that it resumes; a step counts its batches over all processes.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from drafttrain.data.batching import collate
from drafttrain.data.features import FeatureSource
from drafttrain.data.run_folder import RunError
from drafttrain.training.distributed import twin_of
from drafttrain.training.run import train
from tests.load_script import load_script
from tests.tiny_students import make_draft, make_target
from tests.training.tiny_run import make_recipe, make_trainer, open_run, settings, write_recipe
from tests.training.tiny_run import make_target as load

check = load_script("check_distributed")
ROOT = Path(__file__).parents[2]
STEPS = 6


def quiet(message: str) -> None:
    pass


def options(**changes) -> dict:
    """Seven batches an epoch, in two steps: of two processes one has none of its own in the second."""
    steps = {"max_steps": STEPS, "eval_steps": 2, "save_steps": 1, "save_total_limit": 9}
    return steps | {"max_tokens_per_batch": 72, "gradient_accumulation_steps": 4} | changes


def alone(folder: Path, recipe) -> Path:
    """A run of one process, to its end or on from its last checkpoint."""
    run = open_run(folder, recipe)
    train(recipe, run, load(recipe), quiet)
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    run = alone(folder / "straight", make_recipe(folder, **options()))
    assert check.read(run, "epoch")[0] == pytest.approx(4 / 7), "seven batches an epoch"
    return run


@pytest.mark.parametrize("engine", check.ENGINES)
def test_two_processes_go_on_as_one_and_one_goes_on_as_two(straight, engine) -> None:
    folder, start = straight.parent, check.start_of(straight)
    recipe = write_recipe(folder, settings(folder, **options(gradient_accumulation_steps=2)), f"{engine}.yaml")
    run = check.goes_on(straight, 1, folder / engine)  # Within the first epoch.
    shutil.rmtree(run / "draft")
    check.launch(engine, 2, [(recipe, run)])
    check.compare(run, straight, STEPS, start)
    assert sorted(path.name for path in (run / "checkpoint-6").glob("rng*")) == ["rng_state_0.pth", "rng_state_1.pth"]
    step = json.loads((run / "draft" / "drafttrain.json").read_text())["validation"]["step"]
    kept, saved = check.weights(run / "draft" / "master"), check.weights(run / f"checkpoint-{step}")
    assert kept.keys() == saved.keys() and all(torch.equal(kept[name], saved[name]) for name in kept)
    then = check.goes_on(run, 3, folder / f"{engine}-then")  # Within the second.
    check.compare(alone(then, make_recipe(folder, **options())), straight, STEPS, start)


def test_a_target_that_is_spread_over_two_processes_teaches_the_same(straight) -> None:
    folder, start = straight.parent, check.start_of(straight)
    values = settings(folder, **options(gradient_accumulation_steps=2))
    values["target"] |= {"shard": True}
    recipe = write_recipe(folder, values, "shard.yaml")
    check.launch("ddp", 2, [(recipe, folder / "shard")])
    check.compare(folder / "shard", straight, STEPS, start)


def test_four_processes_train_every_method(tmp_path) -> None:
    values = settings(tmp_path, max_steps=2, max_tokens_per_batch=32, eval_steps=2)
    write_recipe(tmp_path, values, "eagle3.yaml")
    del values["training"]["ttt_steps"]
    write_recipe(tmp_path, values | {"method": "medusa", "draft": {"num_heads": 3}}, "medusa.yaml")
    values["data"] = {name: value for name, value in values["data"].items() if name != "draft_vocab"}
    write_recipe(tmp_path, values | {"method": "kd", "draft": {"num_hidden_layers": 3}}, "kd.yaml")
    methods = ("eagle3", "medusa", "kd")
    check.launch("ddp", 4, [(tmp_path / f"{method}.yaml", tmp_path / method) for method in methods])
    for method in methods:
        run = tmp_path / method
        assert len(check.read(run, "loss")) == 2 and len(check.read(run, "eval_acceptance_length")) == 1
        assert all(torch.isfinite(t).all() for t in check.weights(run / "checkpoint-2").values())
        assert json.loads((run / "checkpoint-2" / "position.json").read_text())["batches"] == 8


def test_a_resume_that_would_take_other_steps_is_refused(straight) -> None:
    folder = straight.parent
    run = check.goes_on(straight, 4, folder / "refused")
    recipe = make_recipe(folder, **options(gradient_accumulation_steps=3))
    with pytest.raises(RunError, match=r"4 batches a step \(1 processes x 4\); here are 1 processes x 3.*steps=4"):
        train(recipe, open_run(run, recipe), load(recipe), quiet)
    position = run / "checkpoint-4" / "position.json"
    assert json.loads(position.read_text()) == {"batches": 16, "batches_per_step": 4, "processes": 1}
    assert alone(run, make_recipe(folder, **options())) == run
    assert check.compare(run, straight, STEPS, check.start_of(straight))["weights"] == 0


def test_a_comparison_sees_another_trajectory(straight) -> None:
    folder, start = straight.parent, check.start_of(straight)
    assert max(check.compare(straight, straight, STEPS, start).values()) == 0
    other = alone(folder / "other", make_recipe(folder, **options(learning_rate=3.006e-3)))
    with pytest.raises(check.Fault, match="other: residuals"):
        check.compare(other, straight, STEPS, start)


def test_configurations_are_read_by_accelerate_and_leave_the_recipe_its_settings() -> None:
    files = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
    assert [path.stem for path in files] == sorted(check.ENGINES)
    for path in files:
        config = load_config_from_file(str(path))
        assert config.mixed_precision == "no" and config.num_machines == 1
        if path.stem == "fsdp2":
            assert config.fsdp_config["fsdp_version"] == 2
            assert config.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False
        if path.stem.startswith("zero"):
            assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
            assert config.deepspeed_config["gradient_accumulation_steps"] == "auto"
            assert config.deepspeed_config["zero3_init_flag"] is False


def test_a_twin_shares_what_is_not_trained() -> None:
    draft = make_draft(make_target())
    twin = twin_of(draft)
    ours, its = dict(draft.named_parameters()), dict(twin.named_parameters())
    assert ours.keys() == its.keys() and not all(p.requires_grad for p in ours.values())
    for name, parameter in ours.items():
        assert (its[name] is parameter) == (not parameter.requires_grad), name
        assert its[name].is_meta == parameter.requires_grad
    assert twin.teacher is draft.teacher and twin.student is not draft.student


def test_the_draft_runs_in_bf16_whoever_wraps_it_and_the_target_does_not(straight) -> None:
    folder = straight.parent
    recipe = make_recipe(folder, **options(bf16=True))
    trainer, prepared = make_trainer(recipe, open_run(folder / "bf16", recipe), load(recipe))
    seen: dict[str, bool] = {}

    class Source(FeatureSource):
        def attach(self, batch):
            seen["target"] = torch.is_autocast_enabled("cpu")
            return found.attach(batch)

    def bare(batch):
        seen["draft"] = torch.is_autocast_enabled("cpu")
        return trainer.model(batch)

    found, trainer.sources["train"] = trainer.sources["train"], Source()
    trainer.compute_loss(bare, collate(prepared.rows["train"][:2]), num_items_in_batch=torch.tensor(9))
    assert seen == {"target": False, "draft": True}
