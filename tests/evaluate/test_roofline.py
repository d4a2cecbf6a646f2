"""The roofline: parameters against real models, published turning points, bytes by hand, and experts touched by
simulation.
"""

import io
import random

import pytest
import torch
import transformers
from rich.console import Console

from drafttrain.evaluate import roofline
from drafttrain.evaluate.elsewhere import print_rooflines, rooflines
from drafttrain.evaluate.roofline import (
    DEVICES,
    Device,
    ModelShape,
    Roofline,
    RooflineError,
    eagle3_shapes,
    find_device,
    layer_seconds_on,
    measure_cpu,
    predict,
    shape_of,
)
from tests.tiny_drafts import make_draft, make_target
from tests.tiny_models import V, make_model

LLAMA_8B = transformers.LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
GPT_OSS_20B = transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32, rope_parameters=None)
H100 = Roofline(DEVICES["H100"])


def counted(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *[(family, {}) for family in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Phi3")],
        *[(family, {}) for family in ("GptOss", "Gemma2", "Gemma3")],
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Qwen3Moe", {"mlp_only_layers": [2], "decoder_sparse_step": 2}),
    ],
)
def test_parameters_of_real_models(family, changes):
    model = make_model(family, **changes)
    assert shape_of(model.config).parameters == counted(model)


def test_parameters_of_mixtral_and_a_wrapped_gemma():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=99)
    assert shape_of(config).parameters == counted(transformers.MixtralForCausalLM(config))
    wrapped = transformers.Gemma3Config(text_config={**sizes, "num_key_value_heads": 2, "vocab_size": 99})
    assert shape_of(wrapped) == shape_of(wrapped.text_config)


def test_parameters_of_known_models():
    assert shape_of(LLAMA_8B).parameters == 8_030_261_248
    assert shape_of(GPT_OSS_20B).parameters == pytest.approx(20.9e9, rel=0.01)
    # Published as 3.6B active, the table left out on one side only.
    assert shape_of(GPT_OSS_20B).active == pytest.approx(3.6e9, rel=0.03)


def test_an_eagle3_draft_counts_as_its_module():
    target = make_target()
    draft = make_draft(target)
    step, commit = eagle3_shapes(draft.shape)
    assert commit.parameters == counted(draft)
    assert commit.parameters - step.parameters == draft.fc.weight.numel()
    assert step.kv == ((2 * 2 * 8, None),)


def test_kv_values_and_windows():
    gemma = shape_of(make_model("Gemma3").config)  # 8 layers: every sixth full, windows of 4 elsewhere
    full = [window for _, window in gemma.kv].count(None)
    assert full == 1 and gemma.cached(10) == 32 * (10 + 7 * 4) and gemma.cached(3) == 32 * 8 * 3
    assert shape_of(make_model("Mistral").config).cached(10) == 32 * 8 * 4
    # 2 x 8 heads x 128 x 32 layers x 2 bytes.
    assert shape_of(LLAMA_8B).cached(1) * 2 == 131072


def test_where_compute_binds():
    assert DEVICES["H200"].ridge() == pytest.approx(206, abs=0.5)
    assert DEVICES["H100"].ridge() == pytest.approx(295, abs=0.5)
    assert DEVICES["H100"].ridge(weight_bytes=1) == pytest.approx(147.6, abs=0.1)
    dense = ModelShape(fixed=8_000_000_000)
    bandwidth_bound = 16e9 / 3.35e12
    assert H100.seconds(dense, 1) == H100.seconds(dense, 295) == pytest.approx(bandwidth_bound)
    assert H100.seconds(dense, 1, batch=590) == pytest.approx(2 * bandwidth_bound, rel=2e-3)
    assert Roofline(DEVICES["H100"], overhead=1e-3).seconds(dense, 1) == pytest.approx(bandwidth_bound + 1e-3)


def test_llama_8b_on_an_h100_against_a_published_fit():
    """T = 5.886 ms + 21.0 us a token + 39.3 ns a cached token was fitted to measurements; peaks lie below it."""
    shape = shape_of(LLAMA_8B)
    cached = (H100.seconds(shape, 1, context=10_000) - H100.seconds(shape, 1)) / 10_000
    assert cached == pytest.approx(39.3e-9, rel=0.01)
    assert 0.7 < H100.seconds(shape, 1) / 5.886e-3 < 1
    each = (H100.seconds(shape, 2000) - H100.seconds(shape, 1000)) / 1000
    assert 0.6 < each / 21.0e-6 < 1


def test_bytes_of_a_round():
    """70B target, 1.4 GB draft, K = 5, two accepted: 147 GB against 420 GB for the same three tokens."""
    target, draft = ModelShape(fixed=70_000_000_000), ModelShape(fixed=700_000_000)
    slow = Roofline(Device("a byte a second", 1.0, 1e30))
    drafting = 5 * slow.seconds(draft, 1) + slow.seconds(target, 6)
    assert drafting == pytest.approx(147e9) and 3 * slow.seconds(target, 1) == pytest.approx(420e9)


def test_experts_touched_as_simulated():
    shape = ModelShape(fixed=100, expert=10, experts=32, topk=4, moe_layers=2)
    rng = random.Random(0)
    draws = [len({e for _ in range(6) for e in rng.sample(range(32), 4)}) for _ in range(20000)]
    assert shape.touched(6) == pytest.approx(sum(draws) / len(draws), rel=3e-3)
    assert shape.touched(1) == pytest.approx(4)
    assert shape.read(1) == pytest.approx(100 + 2 * 4 * 10) == shape.active
    assert shape.read(1e9) == pytest.approx(100 + 2 * 32 * 10) == shape.parameters


def test_verifying_costs_a_dense_target_nothing_and_a_moe_target_much():
    draft = make_draft(make_target()).shape
    rates = (0.8, 0.6, 0.45, 0.35)
    dense, moe = (H100.model(config, draft, rates).verify_at(4) for config in (LLAMA_8B, GPT_OSS_20B))
    assert dense == pytest.approx(1.0, rel=1e-3)
    shape = shape_of(GPT_OSS_20B)
    assert moe == pytest.approx(shape.read(5) / shape.read(1), rel=0.05) and moe > 2


def test_the_model_of_an_eagle3_draft_by_hand():
    draft = make_draft(make_target()).shape
    step, commit = (shape.fixed for shape in eagle3_shapes(draft))
    model = H100.model(LLAMA_8B, draft, (0.8, 0.6), context=0)
    weights = shape_of(LLAMA_8B).fixed
    assert model.predict(2)["c"] == pytest.approx((commit + step) / 2 / weights)
    assert model.predict(2)["speedup"] == pytest.approx(2.4 / (1 + (commit + step) / weights))


def test_a_small_draft_by_hand():
    """4 layers of width 16 over 99 words: c is its bytes over the target's; with fewer head rows the table stays."""
    small = make_model("Llama", hidden_size=16, num_hidden_layers=4, tie_word_embeddings=True).config
    shape, target = shape_of(small), shape_of(LLAMA_8B)
    body = 4 * (2 * 4 * 8 * 16 + 2 * 2 * 8 * 16 + 3 * 16 * 48 + 2 * 16) + 16
    assert (shape.fixed, shape.table, len(shape.kv)) == (body + V * 16, 0, 4)
    fewer = shape_of(small, head_rows=40)
    assert (fewer.fixed, fewer.table) == (body + 40 * 16, V * 16) and shape_of(small, head_rows=V) == shape
    for draft, expected in ((small, shape), (shape, shape), (fewer, fewer)):
        found = H100.model(LLAMA_8B, draft, (0.8, 0.6), context=0).predict(2)
        assert found["c"] == pytest.approx(expected.fixed / target.fixed)
        assert found["speedup"] == pytest.approx(2.4 / (1 + 2 * expected.fixed / target.fixed))


def test_the_first_draft_of_a_round_also_runs_the_last_accepted_one():
    """A round of K = 2 is 1 + m_2 tokens, then one: where compute binds that is (1 + .6) + 1 forwards of a token."""
    busy = Roofline(Device("compute alone", 1e30, 1.0))
    line = busy.draft_line(ModelShape(fixed=10), (0.8, 0.6), batch=3, context=0)
    assert line == pytest.approx((0.6 * 2 * 10 * 3, 2 * 10 * 3))
    assert H100.draft_line(ModelShape(fixed=10), (0.8, 0.6), 1, 0)[0] == 0 and H100.draft_line(None, (0.5,), 1, 0) == (
        0,
        0,
    )


def test_layers_take_their_time():
    roofline = Roofline(Device("x", 1.0, 1e30), overhead=3.0, layer_overhead=5.0)
    assert roofline.seconds(ModelShape(fixed=10, kv=((4, None), (4, None))), 1) == pytest.approx(20 + 3 + 2 * 5)


@pytest.mark.parametrize(("emulated", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_a_cpu_counts_in_the_dtype_that_it_multiplies_faster(emulated, dtype, monkeypatch):
    """Without bf16 instructions float32 is several times as fast, and what training there should be set to."""
    timed = []
    monkeypatch.setattr(roofline, "bf16_is_emulated", lambda: emulated)
    monkeypatch.setattr(roofline, "best_seconds", lambda work, repeats: timed.append(work()) or 0.5)
    device = measure_cpu(1, 16, 3)
    assert [result.shape for result in timed] == [(2**18,), (16, 16)] and timed[1].dtype == dtype
    assert (device.bandwidth, device.flops) == (2 * 2**20 / 0.5, 2 * 16**3 / 0.5)


def test_what_a_layer_is_assumed_to_take_is_printed():
    """30 us for a small model on a GPU; nothing on a CPU, nor for an EAGLE-3 draft, which is one layer."""
    target = make_target()
    eagle3 = make_draft(target).shape
    small = make_model("Llama", hidden_size=16, num_hidden_layers=2).config
    keys = {"tree": None, "policy": None, "lossy": False, "trained": True, "concurrency": 1, "mode": "greedy", "k": 1}
    kinds = {"kd": small, "eagle3": eagle3}
    runs = [{"draft": kind, "label": f"{kind} k=1", "per_position_acceptance": [0.6], **keys} for kind in kinds]
    found = rooflines({"runs": runs}, target, kinds, ["H100", "cpu"], context=0)
    assert [entry["layer_seconds"] for entry in found] == [30e-6, 0, 0, 0]
    # 8 layers of the target, 2 of the draft: at sizes as tiny as these the kernels are all there is.
    assert found[0]["best"][0]["c"] == pytest.approx(2 / 8, rel=0.01)
    assert found[1]["best"] == predict(H100, target.config, eagle3, [0.6], context=0)["best"]
    assert layer_seconds_on(DEVICES["4090"]) == 30e-6
    stream = io.StringIO()
    print_rooflines(found, Console(file=stream, width=80))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("assumed")]
    peak, nothing = "assumed: bytes and FLOPs at the data sheet's peak", "nothing for starting kernels"
    assert lines[:2] == [f"{peak}, 30 us a layer of target and draft for starting its kernels", f"{peak}, {nothing}"]
    assert lines[2:] == [f"assumed: bytes and FLOPs at rates measured on this CPU, {nothing}"] * 2


def test_the_best_k_falls_with_concurrency_until_nothing_pays():
    """At 295 tokens in a forward the H100 is busy: a round of K + 1 tokens costs as many plain steps from there on."""
    small = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=128256
    )
    found = predict(H100, LLAMA_8B, small, (0.7, 0.5, 0.35, 0.25), concurrency=(1, 64, 128, 256, 512), context=64)
    best = {row["concurrency"]: row for row in found["best"]}
    assert best[1]["k"] == 4 and best[1]["speedup"] > 1.8
    assert [best[b]["k"] for b in (1, 64, 128, 512)] == sorted((best[b]["k"] for b in (1, 64, 128, 512)), reverse=True)
    assert best[512]["speedup"] < 1 and 128 < found["break_even"] < 512
    lookup = predict(H100, LLAMA_8B, None, (0.3, 0.2), concurrency=(1, 2), context=64)
    assert lookup["break_even"] is None and lookup["best"][0]["speedup"] == pytest.approx(1.5, rel=1e-3)
    assert lookup["target_step"][0] == pytest.approx(H100.seconds(shape_of(LLAMA_8B), 1, 1, 64))


def test_devices_by_name():
    assert find_device("NVIDIA H200").bandwidth == 4.8e12 and find_device("h100").flops == 989e12
    assert find_device("NVIDIA GeForce RTX 4090") is DEVICES["4090"]
    assert {"A100", "H100", "H200", "B200", "L40S", "4090"} == set(DEVICES)
    with pytest.raises(RooflineError, match="V100.*expected one of A100"):
        find_device("V100")


def test_this_machine_is_measured():
    device = measure_cpu(megabytes=16, width=128, repeats=3)
    assert 1e8 < device.bandwidth < 1e13 and 1e7 < device.flops < 1e15


def test_a_target_that_is_not_counted():
    with pytest.raises(RooflineError, match="mamba.*counts llama"):
        shape_of(transformers.MambaConfig())


def test_vocabulary_is_the_head():
    tied, untied = (shape_of(make_model("Llama", tie_word_embeddings=tie).config) for tie in (True, False))
    assert tied.fixed == untied.fixed and (tied.table, untied.table) == (0, V * 32)
