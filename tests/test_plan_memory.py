"""Plan's formulas of memory: parameters against real drafts, kept activations against autograd's own hooks, peaks
against what torch's allocator handed out in a real training, engines by hand.
"""

import gc
import random
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from drafttrain.data.batching import collate
from drafttrain.data.features import OnlineFeatures
from drafttrain.data.store import StoreKey
from drafttrain.drafts.base import Batch
from drafttrain.drafts.loading import new_draft
from drafttrain.plan_activations import Setting, cast_weights, loss_gradients
from drafttrain.plan_cost import plan_cost, setting_of
from drafttrain.plan_data import volume
from drafttrain.plan_memory import ENGINES, feature_bytes, saved_bytes, step_memory
from drafttrain.plan_shapes import outline_draft
from drafttrain.plan_target import outline_target
from drafttrain.recipe import Recipe, load_recipe, parse_recipe
from drafttrain.target import load_target
from drafttrain.training.run import train
from tests.load_script import load_script
from tests.tiny_models import make_model, make_tokenizer, save
from tests.training.tiny_run import open_run, write_rows

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "vocab_size": 500,
    "max_position_embeddings": 1024,
    "attn_implementation": "sdpa",
}
LAYERS = [2, 4, 6]
TUNED = {"warmup_heads_steps": 0}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Family -> folder of a bf16 target, 256 wide."""
    made: dict = {}

    def folder(family: str, **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            window = {"sliding_window": 512} if family in ("Mistral", "Gemma3") else {}
            model = make_model(family, **WIDE | window | changes).to(torch.bfloat16)
            model.config.dtype = torch.bfloat16
            made[key] = save(path, model, make_tokenizer(80))
        return made[key]

    return folder


def recipe_for(folder, method: str, tmp_path, rows: int = 2, length: int = 150, **sections) -> Recipe:
    """A recipe on rows of token ids that fill one batch."""
    draw = random.Random(0)
    data = write_rows(
        tmp_path / "rows.jsonl", [{"input_ids": [draw.randrange(5, 80) for _ in range(length)]} for _ in range(rows)]
    )
    values = {
        "method": method,
        "target": str(folder),
        "data": {"train": [{"path": str(data)}], "draft_vocab": 300, "max_length": length},
        "training": {"max_steps": 2, "max_tokens_per_batch": rows * length, "warmup_steps": 0, "logging_steps": 1},
    }
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    return parse_recipe(values, tmp_path)


def built(recipe: Recipe):
    """(draft, batch with the target's features, outline of the target, of the draft)."""
    target = load_target(**recipe.target.model_dump())
    outline = outline_target(recipe.target, "cpu")
    draft_outline = outline_draft(recipe, outline)
    layers = LAYERS if recipe.method == "eagle3" else []
    statistics = {"feature_rms": torch.ones(len(layers) * target.hidden_size), "final_rms": torch.ones(256)}
    kept = [0, 3, 7][: recipe.draft.num_hidden_layers] if recipe.draft.student == "pruned" else None
    words = torch.arange(recipe.data.draft_vocab or target.vocab_size)
    draft = new_draft(recipe, target, layers, words, statistics if layers else {}, kept)
    draw = torch.Generator().manual_seed(0)
    T = recipe.data.max_length
    rows = [
        {"index": i, "input_ids": torch.randint(3, 500, (T,), generator=draw), "loss_mask": [1] * T} for i in (0, 1)
    ]
    batch = OnlineFeatures(target, layers, torch.bfloat16).attach(Batch(**collate(rows)))
    return draft, batch, outline, draft_outline


def seen_by_hooks(draft, batch: Batch, bf16: bool) -> int:
    """Bytes of distinct storages that autograd keeps, the draft's own parameters and buffers apart."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*draft.parameters(), *draft.buffers())}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    draft.train()
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        draft(batch)
    return sum(size for size, _ in found.values())


EAGLE3 = {"training": {"ttt_steps": 3}, "features": {"layers": LAYERS}}
CASES = {
    "eagle3": ("Llama", "eagle3", EAGLE3),
    "eagle3 of two layers, normed": (
        "Llama",
        "eagle3",
        EAGLE3 | {"draft": {"num_hidden_layers": 2, "fc_norm": True, "norm_output": True}},
    ),
    "eagle3 of another size": ("Qwen3", "eagle3", EAGLE3 | {"draft": {"hidden_size": 128}}),
    "medusa": ("Llama", "medusa", {"draft": {"num_heads": 3, "num_hidden_layers": 2}}),
    "own heads": ("Llama", "medusa", {"draft": {"own_heads": True}, "data": {"draft_vocab": None}}),
    "sequential": ("Llama", "medusa", {"draft": {"sequential": True}}),
    **{
        f"pruned {family}": (
            family,
            "kd",
            {"draft": {"student": "pruned", "num_hidden_layers": 3}, "data": {"draft_vocab": None}},
        )
        for family in ("Llama", "Qwen3", "Gemma3", "Mistral")
    },
    "fresh": (
        "Llama",
        "kd",
        {"draft": {"student": "fresh", "hidden_size": 160, "num_hidden_layers": 2}, "data": {"draft_vocab": None}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_draft_that_is_trained(name, targets, tmp_path):
    family, method, sections = CASES[name]
    recipe = recipe_for(targets(family), method, tmp_path, **sections)
    draft, _, target, outline = built(recipe)
    assert outline.trained == sum(p.numel() for p in draft.parameters() if p.requires_grad)
    model = load_target(**recipe.target.model_dump()).model
    assert target.parameters == sum(p.numel() for p in model.parameters())
    assert target.bytes == 2 * target.parameters and target.dtype == "bfloat16"


@pytest.mark.parametrize("lora", [{"r": 4}, {"r": 3, "target_modules": ["q_proj", "down_proj"]}])
def test_adapters_are_counted_by_their_layers(lora, targets, tmp_path):
    draft = {"student": "pruned", "num_hidden_layers": 3, "lora": lora}
    recipe = recipe_for(targets("Llama"), "kd", tmp_path, draft=draft, data={"draft_vocab": None})
    made, _, _, outline = built(recipe)
    assert outline.trained == sum(p.numel() for p in made.parameters() if p.requires_grad) > 0
    tuned = recipe_for(targets("Llama"), "medusa", tmp_path, draft={"num_heads": 2, "lora": lora}, training=TUNED)
    made, _, _, outline = built(tuned)
    assert outline.trained == sum(p.numel() for p in made.parameters() if p.requires_grad)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_activations_are_what_autograd_keeps(name, bf16, targets, tmp_path):
    """Within 3%: small vectors, rotary tables and masks are not counted."""
    family, method, sections = CASES[name]
    recipe = recipe_for(targets(family), method, tmp_path, **sections)
    draft, batch, target, outline = built(recipe)
    setting = Setting(300, 150, 2 if bf16 else 4, "cpu", 2, 2)
    weights = cast_weights(outline, setting, kept=True) + loss_gradients(outline)
    expected = saved_bytes(recipe, outline, target, setting) + weights
    assert seen_by_hooks(draft, batch, bf16) == pytest.approx(expected, rel=0.03)


def test_activations_of_a_tuned_target(targets, tmp_path):
    recipe = recipe_for(targets("Llama"), "medusa", tmp_path, draft={"num_heads": 2, "lora": {"r": 4}}, training=TUNED)
    draft, batch, target, outline = built(recipe)
    setting = Setting(300, 150, 2, "cpu", 2, 2)
    expected = saved_bytes(recipe, outline, target, setting) + cast_weights(outline, setting, kept=True)
    assert seen_by_hooks(draft, batch, True) == pytest.approx(expected, rel=0.1)


TRAINED = {
    "eagle3": ("eagle3", {"training": {"ttt_steps": 3}}),
    "medusa": ("medusa", {"draft": {"num_heads": 2, "own_heads": True}, "data": {"draft_vocab": None}}),
    "kd": (
        "kd",
        {
            "draft": {"student": "pruned", "num_hidden_layers": 3, "choose_layers": "even"},
            "data": {"draft_vocab": None},
        },
    ),
}


TRAINED["kd, layers made again"] = (
    "kd",
    {**TRAINED["kd"][1], "training": {"gradient_checkpointing": True, "max_tokens_per_batch": 1024}},
)


@pytest.mark.parametrize("name", TRAINED)
def test_the_peak_of_a_training(name, targets, tmp_path):
    """Two steps of a real training: the target's weights and the most that the allocator had handed out, within 15%."""
    method, sections = TRAINED[name]
    folder = targets("Llama", vocab_size=4000)
    sections = {key: {**values} for key, values in sections.items()}
    if name == "eagle3":
        sections["data"] = {"draft_vocab": 1000}
    rows = sections.get("training", {}).get("max_tokens_per_batch", 512) // 128
    recipe = recipe_for(folder, method, tmp_path, rows=rows, length=128, **sections)
    run = open_run(tmp_path / "run", recipe)
    target = load_target(**recipe.target.model_dump())
    gc.collect()  # Else what other tests left is freed meanwhile, and counted.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(recipe, run, target, say=lambda message: None)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    measured = peak + sum(p.numel() * p.element_size() for p in target.model.parameters())
    found = plan_cost(recipe, device="cpu", rates=False)["memory"]["alone"]
    assert found["peak"] == pytest.approx(measured, rel=0.15), found


def test_engines_by_hand(targets, tmp_path):
    """P bytes of fp32 masters on 4 processes; a DeepSpeed bucket of 5e7 fp32 gradients is held from the backward on."""
    recipe = recipe_for(targets("Llama"), "eagle3", tmp_path, **EAGLE3)
    target = outline_target(recipe.target, "cpu")
    draft = outline_draft(recipe, target)
    setting = setting_of(recipe, target, "cpu", volume(recipe))
    P, bucket = 4 * draft.trained, 4 * 50_000_000
    memory = {name: step_memory(recipe, draft, target, setting, name, 4) for name in ENGINES}
    one = step_memory(recipe, draft, target, setting)
    assert one.held["draft, fp32 masters"] == P and one.held["optimizer"] == 2 * P
    masters = {"ddp": P, "fsdp2": P // 4, "zero1": P + P // 4, "zero2": P + P // 4, "zero3": P // 4 + P // 4}
    moments = {"ddp": 2 * P, "fsdp2": P // 2, "zero1": P // 2, "zero2": P // 2, "zero3": P // 2}
    for name, found in memory.items():
        assert found.held["draft, fp32 masters"] == masters[name], name
        assert found.held["optimizer"] == moments[name], name
        assert found.held["target"] == one.held["target"]
    assert memory["ddp"].at("loss") == one.at("loss") + P
    assert memory["zero2"].moments["backward, start"]["gradient buckets"] == bucket
    assert memory["fsdp2"].moments["backward, end"]["gathered weights"] == P
    assert memory["fsdp2"].moments["optimizer"]["gradients"] == P // 4 and one.moments["optimizer"]["gradients"] == P
    accumulated = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"gradient_accumulation_steps": 2})}
    )
    more = step_memory(accumulated, draft, target, setting)
    assert more.held["gradients (accumulated)"] == P and more.at("target forward") == one.at("target forward") + P
    assert more.at("optimizer") == one.at("optimizer")


def test_peaks_grow_with_the_batch_and_without_bf16(targets, tmp_path):
    recipe = recipe_for(targets("Llama"), "eagle3", tmp_path, **EAGLE3)
    target = outline_target(recipe.target, "cpu")
    draft = outline_draft(recipe, target)
    setting = setting_of(recipe, target, "cpu", volume(recipe))
    assert setting.tokens == 300 and setting.c == 2
    peaks = [step_memory(recipe, draft, target, replace(setting, tokens=n)).peak for n in (300, 600, 4096)]
    assert peaks == sorted(peaks)
    activations = [saved_bytes(recipe, draft, target, replace(setting, tokens=n)) for n in (300, 600)]
    assert activations[1] == 2 * activations[0]
    assert saved_bytes(recipe, draft, target, replace(setting, c=4)) > 1.3 * activations[0]


def test_features_take_what_the_store_says(targets, tmp_path):
    recipe = recipe_for(targets("Llama"), "eagle3", tmp_path, **EAGLE3)
    target = outline_target(recipe.target, "cpu")
    draft = outline_draft(recipe, target)
    stored = plan_cost(recipe, device="cpu", rates=False)["storage"]
    assert stored["bytes_per_token"] == StoreKey("", tuple(LAYERS), "bfloat16", "").token_bytes(256) == 4 * 512 + 8
    assert feature_bytes(recipe, draft, target, 2) == 4 * 512 + 12


def test_an_eagle3_draft_that_goes_on_keeps_its_own_shape(targets, tmp_path):
    """draft.init_from: width, layers, vocabulary and features are the checkpoint's, not the recipe's."""
    first = recipe_for(targets("Llama"), "eagle3", tmp_path, **EAGLE3 | {"draft": {"num_hidden_layers": 2}})
    draft, _, target, before = built(first)
    (tmp_path / "start").mkdir()
    draft.save_pretrained(tmp_path / "start")
    on = recipe_for(
        targets("Llama"), "eagle3", tmp_path, data={"draft_vocab": 100}, draft={"init_from": str(tmp_path / "start")}
    )
    after = outline_draft(on, target)
    assert after.trained == before.trained == sum(p.numel() for p in draft.parameters())
    assert (after.head_rows, after.depth, after.feature_layers) == (300, 2, tuple(LAYERS))


def test_the_measurement_s_own_recipes(tmp_path, monkeypatch):
    """Each fills one batch exactly, so that what is estimated is what is trained."""
    bench = load_script("bench_plan")
    small = {**bench.SIZES, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
    bench.write_target(tmp_path / "target", small)
    for name, own in bench.RECIPES.items():
        words = own.get("data", {}).get("draft_vocab")
        monkeypatch.setitem(bench.RECIPES, name, {**own, "data": {"draft_vocab": words and 100}})
        path = bench.write_recipe(tmp_path, name, tokens=64, length=16, words=300)
        recipe = load_recipe(path)
        assert volume(recipe).batch == recipe.training.max_tokens_per_batch
        assert plan_cost(recipe, device="cpu", rates=False)["memory"]["alone"]["peak"] > 0
    assert 0 < bench.resident("VmRSS") <= bench.resident("VmHWM")


def test_a_target_that_is_spread_over_processes(targets, tmp_path):
    recipe = recipe_for(targets("Llama"), "eagle3", tmp_path, **EAGLE3)
    target = outline_target(recipe.target, "cpu")
    draft, setting = outline_draft(recipe, target), setting_of(recipe, target, "cpu", volume(recipe))
    spread = recipe.model_copy(update={"target": recipe.target.model_copy(update={"shard": True})})
    whole, parts = (
        [step_memory(one, draft, target, setting, "fsdp2", N).held["target"] for N in (1, 4)]
        for one in (recipe, spread)
    )
    layers, size = target.model.layers, target.itemsize
    assert whole == [target.bytes, target.bytes]
    other = target.bytes - sum(layers) * size
    assert parts == [target.bytes, other + sum(layers) * size // 4 + 2 * layers[0] * size]
    assert parts[1] < target.bytes
