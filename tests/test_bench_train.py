"""scripts/bench_train.py: its operations by hand and as torch counts them, pairs and table from canned measurements,
both ways of the attention that it times.
"""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from drafttrain.errors import UserError
from tests.load_script import load_script

bench = load_script("bench_train")
ours = load_script("train_step")
timing = load_script("step_timing")

TINY = {"heads": 1, "kv_heads": 1, "head_dim": 2, "intermediate": 4, "hidden": 2, "words": 3, "unroll": 2, "tokens": 5}
SMALL = {
    **{"heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 24, "hidden": 16, "words": 40, "unroll": 3},
    **{"tokens": 30, "vocab": 64, "dtype": "bfloat16", "device": "cpu", "part": "step", "steps": 2, "warmup": 1},
}


def test_operations_by_hand() -> None:
    # Features 2 x 2 x 5 x 6 x 2 = 240. Layer: q, k, v 3 x 4 x 2, o 4, mlp 3 x 8, so 52 weights x 6 x 5 rows x 2 steps
    # = 3120. Attention: 2 steps x 6 x 5 x 5 x 2 = 600. Head: 3 + 2 rows x 6 x 6 = 180. Teacher: 3 rows x 2 x 6 = 36.
    assert bench.step_flops(TINY) == 240 + 3120 + 600 + 180 + 36


def test_operations_are_those_that_torch_counts() -> None:
    """All but the attention's, which run in one kernel; rows without a teacher run along with the others of a step."""
    target = ours.tiny_target(SMALL)
    draft = ours.new_module(SMALL, target).train()
    batch, _ = ours.make_batch(SMALL, target)
    step = timing.train_step(draft, lambda: draft(batch).objective, SMALL)
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    found = sum(count for op, count in counts.items() if str(op).removeprefix("aten.") in ("mm", "addmm", "bmm"))
    T, H, K, words = (SMALL[name] for name in ("tokens", "hidden", "unroll", "words"))
    attention = K * 6 * T * T * SMALL["heads"] * SMALL["head_dim"]
    along = 6 * H * words * sum(range(K))
    assert found == bench.step_flops(SMALL) - attention + along


def test_both_attentions_of_the_unroll_are_the_same() -> None:
    case = SMALL | {"dtype": "float32", "tokens": 6}
    inputs = ours.attention_inputs(case)
    merged, dense = (ours.unrolled(case, inputs, way) for way in (False, True))
    assert len(merged) == 3 and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(merged, dense, strict=True))
    assert ours.dense_mask(3, 2, "cpu").long().tolist() == [
        [1, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]


def test_a_side_times_its_steps_and_reads_its_memory() -> None:
    held = []

    def step() -> float:
        held.append(torch.ones(2**24))  # 64 MiB, touched
        return float(len(held))

    found = timing.take_steps(step, SMALL)
    assert len(found["seconds"]) == 2 and found["loss"] == 3.0 and min(found["seconds"]) > 0
    assert 180 < found["bytes"] / 2**20 < 260
    first = ours.side(SMALL | {"steps": 1})
    assert first["trained"] == sum(
        (3 * 16 * 16, 2 * 16 * (32 + 2 * 16) + 32 * 16, 3 * 16 * 24, 4 * 16, 40 * 16)
    )  # features, attention, mlp, norms, head
    assert first["statistics_seconds"] > 0 and first["rate"] > 1e8 and 0 < first["bytes"] < 2**28
    assert len(ours.side(SMALL | {"part": "dense attention"})["seconds"]) == 2


# Which measurements, and what is made of them.


def chosen(**options) -> list[dict]:
    values = {"parts": "step,attention", "shapes": "32000x7,8192x5", "hidden": "640", "tokens": "1024,2048"}
    values |= {"dtypes": "bfloat16", "device": "cpu", "vocab": 262144, "steps": 2, "warmup": 1} | options
    return bench.cases(**values)


def test_cases_and_their_names() -> None:
    assert [bench.name_of(case) for case in chosen()] == [
        "step 32000x7 H640 T1024 bfloat16 cpu",
        "step 32000x7 H640 T2048 bfloat16 cpu",
        "step 8192x5 H640 T1024 bfloat16 cpu",
        "step 8192x5 H640 T2048 bfloat16 cpu",
        "attention x7 T1024 bfloat16 cpu",
        "attention x7 T2048 bfloat16 cpu",
        "attention x7 T4096 bfloat16 cpu",
    ]
    assert len(chosen(hidden="640,1024", dtypes="bfloat16,float32", parts="step")) == 16
    for wrong in ({"shapes": "32000"}, {"hidden": "0"}, {"tokens": "a"}, {"parts": "stepp"}, {"dtypes": "float16"}):
        with pytest.raises(UserError, match="Expected"):
            chosen(**wrong)


def test_sides_take_turns_and_the_first_one_changes() -> None:
    case, alone = chosen(parts="step", shapes="8192x5", tokens="1024")[0], chosen(parts="attention")[-1]
    order = [(repeat, side) for _, repeat, side in bench.plan([case], 3, True)]
    assert order == [(0, "ours"), (0, "peer"), (1, "peer"), (1, "ours"), (2, "ours"), (2, "peer")]
    assert {side for _, _, side in bench.plan([case], 3, False)} == {"ours"}
    assert [side for _, _, side in bench.plan([alone], 2, True)] == ["ours", "ours"]


CASE = {**SMALL, "words": 8192, "unroll": 5, "tokens": 1024, "hidden": 640, "intermediate": 2048, "head_dim": 256}


def answers(rate: float) -> list[dict]:
    """Three pairs: 2, 2.5 and 1.8 times as fast."""
    out = []
    for repeat, (mine, other) in enumerate([(1.0, 2.0), (2.0, 5.0), (1.0, 1.8)]):
        more = {"repeat": repeat, "threads": 2, "torch": "2"}
        seconds = [mine - 0.1, mine, mine + 0.5]
        out.append({"side": "ours", "seconds": seconds, "bytes": (100 + repeat) * 2**20, "rate": rate} | more)
        out[-1]["statistics_seconds"] = 3.0 + repeat
        out.append({"side": "peer", "seconds": [other], "bytes": (400 - repeat) * 2**20} | more)
    return out


def test_ratios_are_those_of_the_pairs() -> None:
    rate = bench.step_flops(CASE) / 0.7  # So the steps of one second run at 70% of it.
    found = bench.summary(CASE, answers(rate))
    assert found["ratio"] == pytest.approx((2.0, 1.8, 2.5))
    assert found["seconds"]["ours"] == pytest.approx((1.5, 0.9, 2.5))
    assert found["memory_ratio"] == pytest.approx(102 / 400)
    assert found["of_rate"] == pytest.approx((0.7, 0.35, 0.7))
    assert found["statistics_seconds"] == 4.0
    cells = {column.header: list(column.cells) for column in bench.table([found]).columns}
    assert cells["times as fast"] == ["2.00"] and cells["pairs"] == ["1.80-2.50"]
    assert cells["ours tok/s"] == ["682.7"] and cells["other tok/s"] == ["512.0"]
    assert cells["ours MiB"] == ["102"] and cells["other MiB"] == ["400"] and cells["share"] == ["0.26"]
    assert cells["of rate"] == ["70% (35%-70%)"]
    alone = bench.summary(CASE, [one for one in answers(rate) if one["side"] == "ours"])
    assert "ratio" not in alone and list(bench.table([alone]).columns[3].cells) == [""]


def test_verdicts_hold_the_goals() -> None:
    found = bench.summary(CASE, answers(bench.step_flops(CASE) / 0.7))
    assert [passed for passed, _ in bench.verdicts([found])] == [True, True, True]
    wider = {**found, "case": CASE | {"words": 32_000}, "memory_ratio": 0.51, "of_rate": (0.59, 0.5, 0.6)}
    assert [passed for passed, _ in bench.verdicts([wider])] == [False, False, False]
    assert not list(bench.verdicts([{**found, "case": CASE | {"dtype": "float32"}}]))
    dense = {"name": "a", "case": {"part": "attention", "tokens": 2048, "dtype": "bfloat16"}, "ratio": (4.9, 4.8, 5)}
    short = {"case": {"part": "attention", "tokens": 1024}, "name": "b", "bytes": {"ours": 100}}
    for amount, linear in ((4 * 100, True), (6 * 100, False)):  # 4 times the tokens; 6 is 4^1.29
        long = {"case": {"part": "attention", "tokens": 4096}, "name": "c", "bytes": {"ours": amount}}
        lines = list(bench.verdicts([short, {**dense, "bytes": {"ours": 200}}, long]))
        assert [passed for passed, _ in lines] == [False, linear]
    assert bench.growth(short, {"case": {"tokens": 4096}, "bytes": {"ours": 1600}}) == pytest.approx(2.0)


def test_what_is_in_the_file_is_not_measured_again(tmp_path, monkeypatch) -> None:
    file, ran = tmp_path / "train.json", []

    def run_side(case, side, python):
        if len(ran) == 3:
            raise UserError("cut off")
        ran.append((bench.name_of(case), side))
        return {"seconds": [1.0], "bytes": 1, "threads": 2, "torch": "2"}

    monkeypatch.setattr(bench, "run_side", run_side)
    case = chosen(parts="attention", tokens="64")[:1]
    with pytest.raises(UserError, match="cut off"):
        bench.measure(case, 2, None, file, lambda line: None)
    assert len(json.loads(file.read_text())["measurements"]) == 3
    ran.clear()
    found = bench.measure(case, 2, None, file, lambda line: None)
    assert ran == [("attention x7 T64 bfloat16 cpu", "ours")]
    assert [(one["repeat"], one["side"]) for one in found] == [(0, "ours"), (0, "dense"), (1, "dense"), (1, "ours")]


def test_a_side_answers_in_its_last_line_or_says_what_failed(tmp_path, monkeypatch) -> None:
    script = tmp_path / "side.py"
    script.write_text("import sys, json\nprint('noise')\nprint(json.dumps({'got': json.loads(sys.argv[1])['part']}))\n")
    monkeypatch.setattr(bench, "OURS", script)
    case = chosen(parts="attention", tokens="64")[0]
    assert bench.run_side(case, "ours", tmp_path) == {"got": "attention"}
    assert bench.run_side(case, "dense", tmp_path) == {"got": "dense attention"}
    script.write_text("raise ValueError('of no use')\n")
    with pytest.raises(UserError, match=r"ours on attention x7 T64 bfloat16 cpu ended with 1:[\s\S]*of no use"):
        bench.run_side(case, "ours", tmp_path)
    with pytest.raises(UserError, match="make peer"):
        bench.run_side(case, "peer", tmp_path / "python")
