"""The cost of a training, for a target of Llama 3.1 8B's sizes that exists as a config alone: every figure by hand."""

import io
import json

import pytest
import transformers
from rich.console import Console

from drafttrain.evaluate.roofline import DEVICES, RooflineError, shape_of
from drafttrain.plan_candidates import PlanError
from drafttrain.plan_compute import hours_of
from drafttrain.plan_cost import plan_cost
from drafttrain.plan_cost_print import next_step, print_cost
from drafttrain.plan_data import ASSUMED_LENGTH, ASSUMED_ROWS, volume
from drafttrain.plan_published import PUBLISHED, band, family_of
from drafttrain.plan_target import outline_target
from drafttrain.recipe import Recipe, TargetConfig, parse_recipe
from drafttrain.target import TargetError
from tests.test_plan import GEMMA_270M
from tests.tiny_models import make_tokenizer
from tests.training.tiny_run import write_rows

LLAMA = transformers.LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)
LAYER = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
EAGLE3_LAYER = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 3 * 4096
TOKENS = 10_000_000


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Folders with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    LLAMA.save_pretrained(folder / "llama")
    GEMMA_270M.save_pretrained(folder / "gemma")
    config = json.loads((folder / "gemma" / "config.json").read_text())
    (folder / "gemma" / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma3ForCausalLM"]}))
    return folder


def recipe_for(bare, method: str = "eagle3", name: str = "llama", **sections) -> Recipe:
    values = {
        "method": method,
        "target": str(bare / name),
        "data": {"train": [{"dataset": "some/where"}], "max_length": 2048},
        "training": {"num_train_epochs": 2},
    }
    for key, own in sections.items():
        values[key] = values.get(key, {}) | own if isinstance(own, dict) else own
    return parse_recipe(values, bare)


def test_parameters_of_an_8b_from_its_config(bare):
    found = plan_cost(recipe_for(bare), device="H100", tokens=TOKENS)
    total = 32 * LAYER + 2 * 128256 * 4096 + 4096
    assert total == 8_030_261_248
    assert found["target"]["parameters"] == total and found["target"]["bytes"] == 2 * total
    parts = {part["name"]: part["parameters"] for part in found["draft"]["parts"]}
    assert parts == {"fusion": 3 * 4096 * 4096, "layers": EAGLE3_LAYER + 4096, "head": 32000 * 4096}
    assert found["draft"]["trained"] == sum(parts.values()) and found["draft"]["feature_layers"] == [2, 16, 29]
    held = found["memory"]["alone"]["parts"]
    assert held["draft, fp32 masters"] == 4 * sum(parts.values()) and held["optimizer"] == 8 * sum(parts.values())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_target_on_the_meta_device_has_the_roofline_s_parameters(bare, name):
    target = outline_target(TargetConfig(name_or_path=str(bare / name)))
    shape = shape_of(target.model.config)
    assert target.parameters == shape.parameters
    assert target.model.active + target.model.vocab * target.model.H + target.model.norm == shape.active


def test_experts_that_a_token_does_not_use_are_not_multiplied(tmp_path):
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    target = outline_target(TargetConfig(name_or_path=str(tmp_path)))
    idle = 3 * 6 * (3 * 64 * 48)
    assert target.model.active == sum(target.model.layers) - idle
    assert target.model.shape.I == 2 * 48


def test_hours_by_hand(bare):
    """2 epochs of 10M tokens, 60% of them supervised (assumed), rows of 1,000 tokens, 7 unroll steps."""
    recipe = recipe_for(bare)
    found = plan_cost(recipe, device="H100,A100", tokens=TOKENS, processes=4, utilisation=0.5)
    flops = found["flops"]
    target = 2 * 32 * LAYER + 2 * 4096 * 1000 * 32
    statistics = 2 * 128256 * 4096 * 0.6
    body = EAGLE3_LAYER  # norms are counted with the matrices: 12 k of 243 M
    draft = 4 * 3 * 4096 * 4096 + 7 * (6 * body + 7 * 4096 * 1000)
    head = 0.6 * (7 * 6 * 32000 * 4096 + 2 * 32000 * 4096)
    assert flops["target"] == pytest.approx(target) and flops["statistics"] == pytest.approx(statistics)
    assert flops["draft"] == pytest.approx(draft) and flops["head"] == pytest.approx(head)
    assert flops["total"] == pytest.approx(2 * TOKENS * (target + statistics + draft + head))
    h100, a100 = found["hours"]
    assert h100["device_hours"] == pytest.approx(flops["total"] / (989e12 * 0.5) / 3600)
    assert a100["device_hours"] / h100["device_hours"] == pytest.approx(989 / 312)
    assert h100["wall_hours"] == pytest.approx(h100["device_hours"] / 4) and not h100["utilisation_assumed"]
    assert flops["steps"] == round(2 * TOKENS / (16384 * 4)) and flops["epochs"] == 2
    assert hours_of(989e12 * 3600, DEVICES["H100"], 1.0) == pytest.approx(1.0)
    # Stored features: the target runs once, not in every epoch.
    stored = plan_cost(recipe_for(bare, features={"source": "store"}), device="H100", tokens=TOKENS, utilisation=0.5)
    assert stored["flops"]["forwards"] == TOKENS
    assert stored["hours"][0]["target"] == pytest.approx(h100["target"] / 2)


def test_max_steps_end_a_training_sooner(bare):
    recipe = recipe_for(bare, training={"max_steps": 10, "max_tokens_per_batch": 4096})
    assert plan_cost(recipe, device="H100", tokens=TOKENS, processes=2)["flops"]["trained"] == 10 * 2 * 4096


def test_an_eagle3_training_of_200k_samples_takes_the_published_hours(bare):
    """16 A100 hours are published for an 8B target and 200k samples; of 1,000 tokens, one epoch, at what is assumed."""
    recipe = recipe_for(bare, training={"num_train_epochs": 1})
    found = plan_cost(recipe, device="A100", tokens=200_000_000)
    assert found["hours"][0]["utilisation_assumed"] and found["hours"][0]["utilisation"] == 0.35
    assert found["hours"][0]["device_hours"] == pytest.approx(16, rel=0.25)


def test_terabytes_are_warned_of(bare, tmp_path):
    """(3 + 1) x 4096 x 2 + 8 = 32,776 bytes a token: 1 TB is 30.5M tokens."""
    recipe = recipe_for(bare, features={"source": "store"})
    small = plan_cost(recipe, device="H100", tokens=1000, output=tmp_path)
    assert small["storage"]["bytes_per_token"] == 32776 and small["storage"]["written"] == 32_776_000
    assert small["warnings"] == []
    large = plan_cost(recipe, device="H100", tokens=40_000_000_000, output=tmp_path)
    tera, disk = large["warnings"]
    assert "writes 1311.0 TB of features (32,776 bytes x 40,000,000,000 tokens)" in tera
    assert "GiB free" in disk and str(tmp_path) in disk and "features.source online" in disk
    assert ("features.source", "online") in [(row["key"], row["value"]) for row in large["suggestions"]]
    online = plan_cost(recipe_for(bare), device="H100", tokens=40_000_000_000)
    assert online["storage"]["written"] == 0 and online["storage"]["bytes"] == large["storage"]["bytes"]
    assert online["warnings"] == []
    hybrid = recipe_for(bare, features={"source": "hybrid", "max_gib": 1})
    found = plan_cost(hybrid, device="H100", tokens=TOKENS)
    assert found["storage"]["written"] == 2**30
    share = 2**30 / (32776 * TOKENS)
    assert found["flops"]["forwards"] == pytest.approx(TOKENS * (share + 2 * (1 - share)), rel=1e-6)
    words = recipe_for(bare, "kd", draft={"student": "pruned"}, features={"source": "topk", "top_k": 64})
    assert plan_cost(words, device="H100", tokens=TOKENS)["storage"]["bytes_per_token"] == 8 * 64 + 8


def test_suggestions_fit_the_device(bare):
    """On an L40S (48 GB): target 16 GB, masters and moments 5 GB. On a 4090 (24 GB) that and the gradients are too much
    already.
    """
    recipe = recipe_for(bare, training={"max_tokens_per_batch": 65536})
    tight = plan_cost(recipe, device="L40S", tokens=TOKENS)
    assert any("does not fit" in line for line in tight["warnings"])
    batch = next(row for row in tight["suggestions"] if row["key"] == "training.max_tokens_per_batch")
    size = int(batch["value"])
    assert f"gradient_accumulation_steps={-(-65536 // size)}" in batch["why"]
    fitting = recipe_for(bare, training={"max_tokens_per_batch": size})
    assert plan_cost(fitting, device="L40S", tokens=TOKENS)["memory"]["alone"]["peak"] <= 0.9 * 48e9
    more = recipe_for(bare, training={"max_tokens_per_batch": size + 1024})
    assert plan_cost(more, device="L40S", tokens=TOKENS)["memory"]["alone"]["peak"] > 0.9 * 48e9
    none = plan_cost(recipe, device="4090", tokens=TOKENS)["suggestions"][0]
    assert none["key"] == "device" and "target 15.0 GiB" in none["why"]
    recipe = recipe_for(bare)
    roomy = plan_cost(recipe, device="B200", tokens=TOKENS, processes=8)
    assert roomy["warnings"] == []
    engine = next(row for row in roomy["suggestions"] if row["key"] == "accelerate configuration")
    assert engine["value"] == "recipes/accelerate/ddp.yaml"
    assert set(roomy["memory"]["engines"]) == {"ddp", "fsdp2", "zero1", "zero2", "zero3"}


def test_regeneration_is_a_row_of_its_own(bare):
    """64 answers at a time on an H100: a step reads the weights once, plus 30 us a layer and what is cached."""
    plain, asked = recipe_for(bare), recipe_for(bare, data={"regenerate": {"max_new_tokens": 300}})
    found = plan_cost(asked, device="H100", tokens=TOKENS)
    assert plan_cost(plain, device="H100", tokens=TOKENS)["regeneration"] == []
    assert found["hours"] == plan_cost(plain, device="H100", tokens=TOKENS)["hours"]
    (row,) = found["regeneration"]
    assert row["tokens"] == 10_000 * 300 and row["batch"] == 64
    read = 2 * (32 * LAYER + 128256 * 4096 + 4096) + 64 * 500 * 32 * 2 * 1024 * 2
    assert row["tokens_per_second"] == pytest.approx(64 / (read / 3.35e12 + 32 * 30e-6), rel=1e-3)
    # 400 tokens of a prompt and 300 new ones, 32 layers x 2 x 8 heads x 128 x 2 bytes each.
    assert row["kv_cache"] == 64 * 700 * 131072
    assert row["hours"] == pytest.approx(row["tokens"] / row["tokens_per_second"] / 3600)


def test_measuring_acceptance_needs_a_cache(bare):
    """16 prompts of up to 2,048 tokens, in batches of 16,384: 131,072 bytes of keys and values a token."""
    recipe = recipe_for(bare, data={"validation": [{"dataset": "some/where"}]})
    plans = [plan_cost(one, device="H100", tokens=TOKENS) for one in (recipe_for(bare), recipe)]
    without, found = (plan["memory"]["alone"] for plan in plans)
    assert "measuring acceptance" not in without["moments"]
    more = found["moments"]["measuring acceptance"] - found["moments"]["target forward"]
    assert more == 16384 * 131072 - 16384 * (8 + 1 + 8)


def test_data_is_counted_or_assumed(bare, tmp_path):
    GEMMA_270M.save_pretrained(tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma3ForCausalLM"]}))
    data = write_rows(
        tmp_path / "rows.jsonl", [{"input_ids": [5] * n, "loss_mask": [0] * 2 + [1] * (n - 2)} for n in (10, 10, 30)]
    )
    recipe = recipe_for(
        tmp_path, name="target", data={"train": [{"path": str(data)}]}, training={"max_tokens_per_batch": 32}
    )
    unread = volume(recipe)
    assert unread.assumed and "4 bytes a token" in unread.how  # No tokenizer beside the config.
    make_tokenizer(90).save_pretrained(tmp_path / "target")
    counted = volume(recipe)
    assert (counted.rows, counted.tokens, counted.supervised, counted.longest) == (3, 50, 44, 30)
    assert not counted.assumed and counted.batch == 30  # 2 x 10 in one batch, 30 in the other.
    assert plan_cost(recipe, device="H100")["memory"]["tokens_per_batch"] == 30
    given = volume(recipe, 5000)
    assert given.tokens == 5000 and given.assumed and given.batch is None
    there = volume(recipe_for(bare))
    assert there.assumed and there.tokens == ASSUMED_ROWS * ASSUMED_LENGTH and "assumed 100,000 rows" in there.how
    chat = {"dataset": "HuggingFaceH4/ultrachat_200k", "split": "train_sft", "weight": 0.5}
    part = {"dataset": "some/where", "split": "train[256:512]"}
    known = volume(recipe_for(bare, data={"train": [chat, part]}))
    assert (
        known.rows == round(207_865 / 2 + 256) and "by its page" in known.how and "256 rows by its split" in known.how
    )


def test_published_bands_have_sources():
    assert all(run.source and (run.tau is None or run.tau[0] <= run.tau[1]) for run in PUBLISHED)
    llama = band("eagle3", "meta-llama/Llama-3.1-8B-Instruct")
    assert (llama["low"], llama["high"], llama["of"]) == (2.45, 4.81, "llama targets")
    assert band("eagle3", "Qwen/Qwen3-8B")["low"] == 2.0 and band("eagle3", "google/gemma-3-1b")["low"] == 2.0
    assert band("kd", "x")["low"] is None and band("kd", "x")["runs"]
    assert band("medusa-2", "x")["low"] is None and family_of("openai/gpt-oss-20b") == "gpt"


def test_the_printed_plan(bare):
    recipe = recipe_for(bare, data={"regenerate": {}}, features={"source": "store"})
    for processes, method in ((1, {}), (8, {})):
        found = plan_cost(recipe, device="H100", tokens=TOKENS, processes=processes, **method)
        stream = io.StringIO()
        print_cost(found, Console(file=stream, width=120))
        text = stream.getvalue()
        for part in (
            "ASSUMED",
            "32,776 bytes a token",
            "35% of the data sheet's bf16 peak (assumed)",
            "arXiv 2503.01840",
        ):
            assert part in text, part
        assert "regeneration on H100, apart from that" in text and ("zero3" in text) == (processes == 8)
        assert "drafttrain prepare" in next_step(found)
    kd = plan_cost(recipe_for(bare, "kd", draft={"student": "pruned"}), device="H100", tokens=TOKENS)
    stream = io.StringIO()
    print_cost(kd, Console(file=stream, width=120))
    assert "no published acceptance length of kd chains" in stream.getvalue()


def test_what_cannot_be_planned(bare, tmp_path):
    with pytest.raises(PlanError, match="--utilisation 1.5; expected"):
        plan_cost(recipe_for(bare), device="H100", utilisation=1.5)
    with pytest.raises(RooflineError, match="abacus"):
        plan_cost(recipe_for(bare), device="abacus")
    with pytest.raises(TargetError, match="no such folder"):
        plan_cost(recipe_for(bare, name="absent"), device="H100")
    with pytest.raises(PlanError, match="draft.init_from is .*whose config is not here"):
        plan_cost(recipe_for(bare, "kd", draft={"init_from": str(tmp_path / "none")}), device="H100")
