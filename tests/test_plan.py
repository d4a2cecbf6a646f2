"""The size planner: parameters against real models and trained students, speedups and break-even by hand, and the
reason why nothing pays.
"""

import io
import json

import pytest
import torch
import transformers
from rich.console import Console

import drafttrain.plan
from drafttrain.drafts.fresh_student import spread
from drafttrain.drafts.small_model import SmallModelProposer
from drafttrain.drafts.students import build_student
from drafttrain.evaluate.cost import CostModel
from drafttrain.evaluate.roofline import RooflineError, shape_of
from drafttrain.evaluate.sizes import Costs, DraftCost
from drafttrain.plan import (
    acceptance_for,
    measured_runs,
    plan_device,
    plan_sizes,
    predict_report,
    predict_student,
    rates_of,
)
from drafttrain.plan_candidates import (
    PlanError,
    Size,
    build_models,
    default_sizes,
    parse_sizes,
    student_config,
    weights_from,
    weights_of,
)
from drafttrain.plan_print import advice, print_plan
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target
from tests.tiny_drafts import make_target
from tests.tiny_models import V, make_model

SIZES = [Size("pruned", 2), Size("fresh", 1, 16)]
GEMMA_270M = transformers.Gemma3TextConfig(
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262144,
)


def test_sizes_from_text():
    config = make_target().config  # 8 layers, 32 wide
    assert parse_sizes("pruned:6, fresh:16x4,pruned:6", config) == [Size("pruned", 6), Size("fresh", 4, 16)]
    assert [str(size) for size in parse_sizes("fresh:16x4,pruned:2", config)] == ["fresh:16x4", "pruned:2"]
    for text, message in (
        ("pruned", "cannot be read; expected pruned:LAYERS"),
        ("fresh:16", "cannot be read"),
        ("fresh:12x2", "12 wide; expected a multiple of 8"),
        ("fresh:64x2", "at most the target's 32"),
        ("fresh:16x9", "9 layers; expected 1 to 8"),
        ("pruned:8", "8 layers; expected 2 to 7"),
        ("pruned:1", "expected 2 to 7"),
    ):
        with pytest.raises(PlanError, match=message):
            parse_sizes(text, config)


def test_default_sizes_span_wide_and_shallow_to_narrow_and_deep():
    labels = list(map(str, default_sizes(GEMMA_270M)))
    assert labels[:5] == ["pruned:2", "pruned:3", "pruned:4", "pruned:6", "pruned:9"]
    assert labels[5:] == [f"fresh:{width}x{depth}" for width in (80, 160, 320) for depth in (1, 2, 4, 8)]
    assert list(map(str, default_sizes(make_target().config)))[:2] == ["pruned:2", "pruned:4"]


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3", "Mistral"])
@pytest.mark.parametrize("rows", [None, 40])
def test_parameters_of_built_models_are_those_of_their_configs(family, rows):
    target = make_target(family)
    ids = None if rows is None else torch.arange(rows)
    for label, model in build_models([*SIZES, Size("fresh", 3, 8)], target).items():
        drafts = SmallModelProposer(model, ids).model
        counted = weights_of(drafts)
        assert counted.parameters == sum(p.numel() for p in drafts.model.parameters())
        config = student_config(parse_sizes(label, target.config)[0], target.config)
        assert counted == weights_from(config, rows, itemsize=4)
        width = config.hidden_size
        facts = counted.facts()
        assert facts["table"] == V * width and facts["head"] == (rows or V) * width
        assert facts["forward_bytes"] == 4 * (facts["body"] + facts["head"])


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_what_is_planned_is_what_is_trained(family):
    target = make_target(family)
    models = build_models(SIZES, target)
    for size in SIZES:
        settings = DraftConfig(**size.settings(), choose_layers="even")
        student = build_student(settings, target, spread(target.num_layers, size.layers))
        ours = {name: tuple(p.shape) for name, p in models[str(size)].model.named_parameters()}
        assert ours == {name: tuple(p.shape) for name, p in student.named_parameters()}
        assert models[str(size)].config.to_dict().get("layer_types") == student.config.to_dict().get("layer_types")


def test_models_share_what_they_can_and_take_the_target_s_dtype():
    target = Target.from_model(make_model("Llama", max_position_embeddings=256).to(torch.bfloat16))
    models = build_models([Size("pruned", 3), Size("fresh", 1, 16), Size("fresh", 2, 16)], target)
    pruned, one, two = models.values()
    assert pruned.embed_weight is target.embed_weight and pruned.num_layers == 3
    assert pruned.layers[2].mlp.up_proj.weight is target.layers[7].mlp.up_proj.weight
    assert one.embed_weight is two.embed_weight and one.dtype == two.dtype == torch.bfloat16
    assert {p.dtype for p in two.model.parameters()} == {torch.bfloat16} and two.layers[0] is not one.layers[0]


def test_assumed_acceptance():
    assert rates_of(0.5, "x", 3) == [0.5, 0.25, 0.125]
    assert rates_of((0.7, 0.5), "x", 3) == [0.7, 0.5] and rates_of([0.7, 0.5, 0.4], "x", 2) == [0.7, 0.5]
    assert rates_of({"": 0.5, "x": 0.9}, "x", 1) == [0.9] and rates_of({"": 0.5, "x": 0.9}, "y", 1) == [0.5]
    for wrong in (1.2, -0.1, (0.5, 0.6), (0.5, -0.1), (), (1.1,)):
        with pytest.raises(PlanError, match="expected a number within 0 to 1"):
            rates_of(wrong, "x", 3)
    with pytest.raises(PlanError, match="no acceptance is given for y"):
        rates_of({"x": 0.5}, "y", 3)


def test_break_even_acceptance_by_hand():
    """One draft at v + c = 1.5: 1 + a = 1.5. With K = 2 at v + 2 c = 1.25: 1 + a + a^2 = 1.25, a = (sqrt 2 - 1) / 2."""
    dear = CostModel({1: (0.9,)}, (0.0, 0.5), {1: 1.0, 3: 1.0})
    assert acceptance_for(1.0, dear, [1]) == pytest.approx(0.5)
    assert acceptance_for(1.2, dear, [1]) == pytest.approx(0.8) and acceptance_for(1.4, dear, [1]) is None
    cheap = CostModel({2: (0.9, 0.8)}, (0.0, 0.125), {1: 1.0, 3: 1.0})
    assert acceptance_for(1.0, cheap, [2]) == pytest.approx((2**0.5 - 1) / 2)
    assert acceptance_for(1.0, cheap, [1, 2]) == pytest.approx(0.125)


def fixed(draft: dict[str, tuple[float, float]], rates) -> Costs:
    """Costs known beforehand: v = 1 + .1 K, o = .05, a draft takes a + b K plain steps of 20 ms."""
    verify = {1: 1.0, 11: 2.0}
    models = {
        label: DraftCost(CostModel({len(rates[label]): rates[label]}, line, verify, rest=0.05), (0.9, 1.1))
        for label, line in draft.items()
    }
    return Costs(0.02, (0.02, 0.021, 0.019), 0.01, models)


def test_the_plan_by_hand(monkeypatch):
    """fresh: S(1) = 1.5 / 1.25, S(2) = 1.75 / 1.45 = 1.207 at alpha .5. pruned: S(1) = 1.8 / 1.65 = 1.091 at .8."""
    target = make_target()

    def measured(target, makes, rates, **options):
        assert set(makes) == {"pruned:2", "fresh:16x1"} and options["context"] == 9
        return fixed({"pruned:2": (0.0, 0.5), "fresh:16x1": (0.0, 0.1)}, rates)

    monkeypatch.setattr(drafttrain.plan, "measure_drafts", measured)
    plan = plan_sizes(target, SIZES, {"": 0.5, "pruned:2": [0.8, 0.5]}, [2, 1], context=9)
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    first, second = plan["sizes"]
    assert (first["label"], plan["best"], plan["reason"]) == ("fresh:16x1", "fresh:16x1", None)
    assert first["draft"] == {"student": "fresh", "num_hidden_layers": 1, "hidden_size": 16}
    assert first["best"] == pytest.approx({"k": 2, "tau": 1.75, "speedup": 1.75 / 1.45, "c": 0.1, "v": 1.2, "o": 0.05})
    assert [row["speedup"] for row in first["predictions"]] == pytest.approx([1.2, 1.75 / 1.45])
    assert first["v"] == pytest.approx([1, 1.1, 1.2]) and first["acceptance_assumed"] is True
    assert second["best"]["k"] == 1 and second["best"]["speedup"] == pytest.approx(1.8 / 1.65)
    # 1 + a = 1.25, or 1 + a + a^2 = 1.45: K = 1 comes first.
    assert first["break_even_acceptance"] == pytest.approx(0.25)
    assert second["break_even_acceptance"] == pytest.approx(0.65)
    # 1 + a + a^2 = 1.091 x 1.45 = 1.582, or 1 + a = 1.364: a = .364 is the smaller.
    assert first["acceptance_to_tie"] == pytest.approx(1.8 / 1.65 * 1.25 - 1)
    # 1 + a = 1.207 x 1.65 = 1.991, or 1 + a + a^2 = 1.207 x 2.25 = 2.716.
    assert second["acceptance_to_tie"] == pytest.approx(((4 * 1.75 / 1.45 * 2.25 - 3) ** 0.5 - 1) / 2)
    assert plan["plain_step"] == 0.02 and plan["head"]["share_of_step"] == 0.5
    assert plan["target"]["parameters"] == sum(p.numel() for p in target.model.parameters())
    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=120))
    text = stream.getvalue()
    assert "ASSUMED" in text and "joint rates 0.8 0.5" in text and "1.21x" in text and "0.90" in text
    assert "student: fresh, num_hidden_layers: 1, hidden_size: 16" in advice(plan, None)
    assert "pays from an acceptance of 0.25, and from 0.36 beats pruned:2" in advice(plan, None)
    assert advice(plan, "r.yaml").endswith(
        "train r.yaml draft.student=fresh draft.num_hidden_layers=1 draft.hidden_size=16"
    )


def test_of_sizes_that_cost_the_same_the_larger_is_named(monkeypatch):
    sizes = [Size("fresh", 1, 8), Size("fresh", 1, 16)]
    lines = {"fresh:8x1": (0.0, 0.1), "fresh:16x1": (0.0, 0.1)}
    monkeypatch.setattr(drafttrain.plan, "measure_drafts", lambda target, makes, rates, **options: fixed(lines, rates))
    assert plan_sizes(make_target(), sizes)["best"] == "fresh:16x1"


def test_a_plan_for_a_device_by_hand():
    """On an H100 at batch 1 a forward is its bytes at 3.35 TB/s and 30 us a layer."""
    plan = plan_device(GEMMA_270M, [Size("fresh", 2, 160), Size("pruned", 6)], "H100", 0.7, [1, 2], context=0)
    small, target = shape_of(student_config(Size("fresh", 2, 160), GEMMA_270M)), shape_of(GEMMA_270M)
    draft, step = (2 * shape.fixed / 3.35e12 + layers * 30e-6 for shape, layers in ((small, 2), (target, 18)))
    fresh = next(entry for entry in plan["sizes"] if entry["kind"] == "fresh")
    assert plan["plain_step"] == pytest.approx(step) and fresh["c"] == pytest.approx(draft / step)
    assert fresh["best"]["speedup"] == pytest.approx((1 + 0.7 + 0.49) / (1 + 2 * draft / step))
    assert plan["best"] == "fresh:160x2" and plan["measured"] is False and fresh["c_range"] is None
    head = 262144 * 640 * 2 / 3.35e12
    assert plan["head"]["share_of_step"] == pytest.approx(head / step)
    # Bytes alone would make depth free: a narrow deep draft as good as a wide shallow one of the same size.
    free = plan_device(GEMMA_270M, [Size("fresh", 8, 80), Size("fresh", 1, 160)], "H100", layer_seconds=0)
    real = plan_device(GEMMA_270M, [Size("fresh", 8, 80), Size("fresh", 1, 160)], "H100")
    assert (free["best"], real["best"]) == ("fresh:80x8", "fresh:160x1")


def test_why_nothing_pays():
    """By bytes alone the head is 63% of Gemma 3 270M, so that c is above .63 for every full-width student."""
    sizes = [Size("pruned", 2), Size("pruned", 6)]
    plan = plan_device(GEMMA_270M, sizes, "H100", 0.6, layer_seconds=0, context=0)
    share = 262144 * 640 / shape_of(GEMMA_270M).fixed
    best = plan["sizes"][0]
    assert plan["best"] is None and best["label"] == "pruned:2" and best["c"] > share > 0.6
    assert f"the head over 262,144 words alone takes {share:.2f} of a plain step" in plan["reason"]
    assert f"every full-width student drafts at c = {best['c']:.2f} or more" in plan["reason"]
    assert f"predicted at {1.6 / (1 + best['c']):.2f}x" in plan["reason"] and "gains 0.60 tokens" in plan["reason"]
    assert f"an acceptance of {best['c']:.2f}, by pruned:2" in plan["reason"]
    assert "larger target" in advice(plan, None) and "--draft-vocab" in advice(plan, None)
    # With fewer words in the head the same student pays.
    fewer = plan_device(GEMMA_270M, sizes, "H100", 0.6, layer_seconds=0, context=0, draft_vocab=8192)
    assert fewer["best"] == "pruned:2" and fewer["draft_vocab"] == 8192
    assert fewer["sizes"][0]["head"] == 8192 * 640 and fewer["sizes"][0]["table"] == 262144 * 640


def test_what_cannot_be_planned():
    config = make_target().config
    for options, message in (
        ({"ks": [0]}, "K from 1 on"),
        ({"candidates": []}, "0 sizes"),
        ({"acceptance": {"": 0.5, "pruned:3": 0.6}}, "given for pruned:3; the sizes are pruned:2"),
        ({"acceptance": (0.5,), "ks": [2]}, "rates for 1 positions, K starts at 2"),
        ({"draft_vocab": 0}, "draft vocabulary is 0"),
    ):
        with pytest.raises(PlanError, match=message):
            plan_device(config, **{"candidates": SIZES, "device": "H100"} | options)
    with pytest.raises(RooflineError, match="V100.*expected one of A100"):
        plan_device(config, SIZES, "V100")


def test_a_plan_measured_on_a_tiny_target():
    target = make_target("Gemma3")
    plan = plan_sizes(target, SIZES, 0.6, [1, 2], draft_vocab=40, context=8, rounds=2, repeats=1)
    assert {entry["label"] for entry in plan["sizes"]} == {"pruned:2", "fresh:16x1"} and plan["draft_vocab"] == 40
    for entry in plan["sizes"]:
        found = entry["predictions"][1]
        assert found["speedup"] == pytest.approx(1.96 / (found["v"] + 2 * found["c"] + found["o"]))
        assert (
            entry["c"] > 0 and len(entry["v"]) == 3 and entry["head"] == 40 * (32 if entry["kind"] == "pruned" else 16)
        )


def test_a_trained_student_by_hand(monkeypatch):
    """Its own line .2 K: S(1) = 1.6 / 1.35; over 100 tokens the last round and the proposer's start count too."""
    target = make_target()
    monkeypatch.setattr(
        drafttrain.plan, "measure_drafts", lambda target, makes, rates, **options: fixed({"draft": (0.0, 0.2)}, rates)
    )
    found = predict_student(target, target, {1: [0.6], 2: [0.5, 0.3]}, [2, 1])
    assert [row["speedup"] for row in found["predictions"]] == pytest.approx([1.6 / 1.35, 1.8 / 1.65])
    assert predict_student(target, target, [0.6, 0.3], 1)["predictions"][0]["tau"] == pytest.approx(1.6)
    with pytest.raises(PlanError, match="found 1 acceptance rates for K = 1; 1 .* K = 2; expected .* a rate for each"):
        predict_student(target, target, [0.6], [1, 2])
    with pytest.raises(PlanError, match="found no K; expected"):
        predict_student(target, target, [0.6], [])


def run_of(label, k, speedup, **changes):
    sampling = {"temperature": 0.0}
    run = {"id": label, "label": f"{label} k={k}", "draft": "kd", "k": k, "speedup": speedup, "trained": True}
    run |= {"mode": "greedy", "sampling": sampling, "concurrency": 1, "tree": None, "policy": None, "lossy": False}
    run |= {"checkpoint": None, "baseline": "plain", "per_position_acceptance": [0.6, 0.4, 0.2][:k]}
    return run | changes


PLAIN = {**run_of("plain", 0, None, draft="none"), "emitted_tokens": 44, "prompts": 4}


def test_the_runs_of_a_report(tmp_path):
    sampled = {"mode": "one_hot", "sampling": {"temperature": 0.8}}
    runs = [PLAIN, run_of("b", 2, 1.2), run_of("b", 1, 1.1), run_of("b", 3, 1.3, **sampled)]
    runs += [run_of("u", 2, 0.5, trained=False), run_of("t", 2, 0.5, tree="tree"), run_of("b", 2, 0.9, concurrency=4)]
    assert list(measured_runs({"runs": runs}, "kd", "x")) == [1, 2]
    assert measured_runs({"runs": runs}, "kd", "x", 4)[2]["speedup"] == 0.9
    runs += [run_of("b int8", 2, 0.7, quantization="int8")]  # Later in the report than the full one.
    assert measured_runs({"runs": runs}, "kd", "x")[2]["label"] == "b k=2"
    other = run_of("c", 4, 2.0, checkpoint=str(tmp_path / "draft"))
    assert list(measured_runs({"runs": [*runs, other]}, "kd", tmp_path)) == [4]
    with pytest.raises(PlanError, match="no chain of a trained eagle3 draft.*it has plain k=0, b k=2"):
        measured_runs({"runs": runs}, "eagle3", "x")
    with pytest.raises(PlanError, match="it has nothing"):
        measured_runs({}, "kd", "x")


def test_prediction_against_a_report(monkeypatch):
    """10 decoded tokens a request, so that its last round counts; error = predicted / measured - 1."""
    seen = {}

    def measured(target, makes, rates, **options):
        seen.update(rates)
        return fixed({"draft": (0.0, 0.2)}, rates)

    monkeypatch.setattr(drafttrain.plan, "measure_drafts", measured)

    class Draft:
        method = "kd"

        def proposer(self, target):
            raise AssertionError("the costs are given")

    short = run_of("kd", 3, 1.5, per_position_acceptance=[0.6, 0.4])
    found = predict_report(make_target(), Draft(), {"runs": [PLAIN, run_of("kd", 1, 1.25), short]}, "x")
    model = fixed({"draft": (0.0, 0.2)}, {"draft": [0.6, 0.4, 0.0]}).drafts["draft"].model
    one, three = found["predictions"]
    assert seen == {"draft": [0.6, 0.4, 0.0]} and found["label"] == "kd"
    assert three["speedup"] == pytest.approx(model.predict(3, 10)["speedup"]) and three["measured"] == 1.5
    assert one["error"] == pytest.approx(one["speedup"] / 1.25 - 1)
    assert found["median_error"] == pytest.approx((abs(one["error"]) + abs(three["error"])) / 2)


def test_of_experts_a_step_reads_those_it_goes_through():
    """An A3B shape: 128 experts, 8 of them for a token. The head is about as much of the bytes as of the time."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
    )
    plan = plan_device(config, [Size("pruned", 8)], "H100", 0.6, layer_seconds=0)
    shape = shape_of(config)
    assert plan["target"]["forward_bytes"] == 2 * round(shape.read(1)) < 0.15 * plan["target"]["bytes"]
    assert plan["head"]["share_of_bytes"] == pytest.approx(plan["head"]["share_of_step"], rel=0.1)
    # Sixteen requests go through 128 (1 - (15/16)^16) = 82 experts of a layer.
    many = plan_device(config, [Size("pruned", 8)], "H100", 0.6, layer_seconds=0, context=0, concurrency=16)
    experts = 48 * 128 * (1 - (15 / 16) ** 16) * 3 * 2048 * 768
    assert many["target"]["forward_bytes"] == pytest.approx(2 * (shape.fixed + experts))
    assert many["head"]["share_of_bytes"] == pytest.approx(many["head"]["share_of_step"], rel=1e-6)
    small = shape_of(student_config(Size("pruned", 8), config))
    assert many["sizes"][0]["forward_bytes"] == 2 * round(small.read(16))


def test_a_layer_costs_its_kernels_on_a_gpu_and_nothing_on_a_cpu():
    gpu = plan_device(GEMMA_270M, [Size("pruned", 6)], "H100")
    cpu = plan_device(GEMMA_270M, [Size("pruned", 6)], "cpu")
    assert (gpu["layer_seconds"], cpu["layer_seconds"]) == (30e-6, 0.0)
