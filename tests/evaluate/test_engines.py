"""Reports from servers with scripted acceptance: every figure is recomputed by hand, and every way to fail is tried.

Round after round of the scripted draft (k = 3) accepts 2, 3, 0, 2, 3, 0 ..; with 10 new tokens a prompt takes the
prefill's token and four rounds (3 + 4 + 1 + 3, the last two of them cut): 7 of 12 drafts accepted."""

import json

import pytest

from drafttrain.data.http_client import EngineError, EngineLostError
from drafttrain.evaluate import report_summary
from drafttrain.evaluate.engine_report import Answer, EngineCounts, EnginePrompt, EngineRun, Group, engine_report
from drafttrain.evaluate.engines import evaluate_server
from drafttrain.evaluate.prometheus import Metrics
from drafttrain.evaluate.report import write_report
from drafttrain.evaluate.runner import Prompt
from drafttrain.nn.sampling import Sampling
from tests.evaluate.fake_server import FakeEngine

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
NEW = 10
TAU = 1 + 7 / 4
POSITIONS = [3 / 4, 3 / 4, 1 / 4]


def run_of(report, run_id):
    return next(run for run in report["runs"] if run["id"] == run_id)


def test_a_server_beside_its_baseline(tmp_path):
    prompts = [Prompt(tuple(PROMPTS[0]), "code"), Prompt(tuple(PROMPTS[1]), "chat"), Prompt(tuple(PROMPTS[2]), "code")]
    with FakeEngine() as engine, FakeEngine(k=0) as baseline:
        options = {"baseline_url": baseline.url, "draft": "eagle3", "max_new_tokens": NEW}
        report = evaluate_server(engine.url + "/v1", prompts, plain_tokens=[[0] * NEW] * 3, **options)

    run = run_of(report, "vllm-eagle3-k3")
    counted = {"iterations": 12, "draft_rounds": 12, "drafted_tokens": 36, "accepted_tokens": 21, "emitted_tokens": 30}
    assert {key: run[key] for key in counted} == counted
    assert run["k"] == 3
    assert run["mean_acceptance_length"] == TAU
    assert run["per_position_acceptance"] == POSITIONS
    assert run["conditional_acceptance"] == [3 / 4, 1, 1 / 3]
    assert run["acceptance_rate"] == 7 / 12
    assert run["denominator"] == "draft_rounds"
    assert run["intervals"]["mean_acceptance_length"] == [TAU, TAU]
    assert run["identical_to_plain"] is True
    assert run["against_ours"]["identical"] == 0
    found = run["against_ours"]["divergences"][0]
    assert (found["position"], found["token"], found["plain_token"]) == (0, 18, 0)
    assert run["per_prompt"]["draft_rounds"] == [4, 4, 4]
    assert run["per_prompt"]["reached"] == [(3, 3, 1)] * 3
    assert {name: row["prompts"] for name, row in run["categories"].items()} == {"chat": 1, "code": 2}
    assert run["categories"]["code"]["mean_acceptance_length"] == TAU
    plain = run_of(report, "plain")
    assert run["baseline"] == "plain" and plain["baseline"] is None and plain["draft"] == "none"
    assert (plain["mean_acceptance_length"], plain["iterations"], plain["k"]) == (1.0, 27, 0)
    assert report["target"]["name"] == "tiny"
    assert report["engine"] == {
        "name": "vllm",
        "version": "0.32.0",
        "url": engine.url + "/v1",
        "baseline_url": baseline.url,
    }
    assert report["interrupted"] is False and report["notes"] == [] and run["notes"] == []
    for one in report["runs"]:
        assert set(report_summary.RUN_KEYS) - {"predicted"} <= set(one)
    # Nor is it the engine that turns conversations into prompts.
    not_an_engine_s = {"peak_memory_bytes", "tuned_from", "drift", "same_choice", "chat"}
    for section, keys in report_summary.SECTION_KEYS.items():
        assert set(keys) - not_an_engine_s <= set(report[section])
    written, _ = write_report(report, tmp_path)
    assert json.loads(written.read_text())["runs"][0]["mean_acceptance_length"] == TAU


def test_what_a_server_is_asked():
    with FakeEngine() as engine:
        evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
        warm_up, first, *_ = engine.bodies
        assert warm_up["prompt"] == [7, 6, 5] and warm_up["max_tokens"] == 8
        asked = {"prompt": [5, 6, 7], "max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "stream": True}
        assert first | {"model": "tiny", "return_token_ids": True, **asked} == first
        assert "seed" not in first and len(engine.bodies) == 4
    with FakeEngine(flavour="sglang") as engine:
        sampling = Sampling(0.7, top_p=0.9, top_k=20, seed=4)
        report = evaluate_server(engine.url, ["a text", "another"], max_new_tokens=NEW, sampling=sampling)
        asked = {"prompt": "another", "seed": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
        assert engine.bodies[2] | {"return_spec_tokens_details": True, **asked} == engine.bodies[2]
        assert report["runs"][0]["mode"] == "one_hot" and report["runs"][0]["identical_to_plain"] is None


def test_times_of_deliveries():
    with FakeEngine(pause=0.02) as engine, FakeEngine(k=0, pause=0.02) as baseline:
        report = evaluate_server(engine.url, PROMPTS[:2], baseline_url=baseline.url, max_new_tokens=NEW)
    run, plain = report["runs"]
    assert run["ttft"] >= 0.02
    assert run["itl"]["p95"] >= run["itl"]["p50"] >= 0.018
    # Four deliveries after the prefill's against nine: pauses alone make it 2.25.
    assert all(seconds >= 4 * 0.018 for seconds in run["per_prompt"]["seconds"])
    assert all(seconds >= 9 * 0.018 for seconds in plain["per_prompt"]["seconds"])
    assert run["per_prompt"]["decoded"] == [9, 9]
    ratio = sum(plain["per_prompt"]["seconds"]) / sum(run["per_prompt"]["seconds"])
    assert run["speedup"] == pytest.approx(ratio)
    assert run["tokens_per_second"]["pooled"] == pytest.approx(18 / sum(run["per_prompt"]["seconds"]))


@pytest.mark.parametrize("details", [False, True])
def test_concurrent_requests_are_pooled_unless_each_is_reported(details):
    with FakeEngine(details=details) as engine:
        report = evaluate_server(engine.url, PROMPTS * 2, max_new_tokens=NEW, concurrency=2)
    (run,) = report["runs"]
    assert run["concurrency"] == 2
    assert (run["draft_rounds"], run["accepted_tokens"], run["drafted_tokens"]) == (24, 42, 72)
    assert run["mean_acceptance_length"] == TAU
    assert run["per_position_acceptance"] == POSITIONS
    assert run["intervals"]["mean_acceptance_length"] == ([TAU, TAU] if details else None)
    assert run["per_prompt"]["accepted"] == ([7] * 6 if details else [None] * 6)
    pooled = 6 * 9 / sum(run["per_prompt"]["seconds"])
    assert run["tokens_per_second"]["pooled"] == pytest.approx(pooled)
    assert run["tokens_per_second"]["total"] == pytest.approx(2 * pooled)


def test_sglang_reports_each_request():
    with FakeEngine(flavour="sglang", details=True, metrics=False) as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW, concurrency=3)
    (run,) = report["runs"]
    assert report["engine"]["name"] == "sglang" and report["engine"]["version"] == "0.5.23"
    assert (run["k"], run["tree"], run["iterations"]) == (3, None, 12)
    # Its own accept length, completion tokens / verify calls, would be 10 / 4.
    assert run["mean_acceptance_length"] == TAU
    assert run["per_position_acceptance"] == POSITIONS
    assert run["acceptance_rate"] == 7 / 12


def test_sglang_with_counters_only_gives_a_lower_bound():
    with FakeEngine(flavour="sglang") as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
    (run,) = report["runs"]
    assert run["draft_rounds"] == 12
    assert run["mean_acceptance_length"] == 1 + 5 / 4
    assert run["per_position_acceptance"] is None and run["acceptance_rate"] is None
    assert any("lower bound" in note for note in run["notes"])


def test_sglang_trees_have_no_acceptance_rate():
    with FakeEngine(flavour="sglang", details=True, topk=4) as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
    (run,) = report["runs"]
    assert run["tree"] == {"kind": "dynamic", "topk": 4, "nodes": 12}
    assert run["k"] == 3 and run["drafted_tokens"] == 12 * 12
    assert run["acceptance_rate"] is None
    assert run["per_position_acceptance"] == POSITIONS


def test_without_baseline_and_without_metrics():
    with FakeEngine(metrics=False) as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
    (run,) = report["runs"]
    assert run["speedup"] is None and run["baseline"] is None
    assert any("no speedup" in note for note in report["notes"])
    assert run["mean_acceptance_length"] is None and run["per_position_acceptance"] is None
    assert run["tokens_per_second"]["pooled"] > 0
    assert any("/metrics is absent" in note for note in run["notes"])
    assert any("no acceptance" in note for note in run["notes"])


def test_counters_that_lag_behind_the_answer_are_waited_for():
    with FakeEngine(lag=0.1) as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
    assert report["runs"][0]["per_prompt"]["draft_rounds"] == [4, 4, 4]
    assert report["runs"][0]["notes"] == []


def test_other_clients_are_noticed():
    with FakeEngine(foreign=3) as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
    assert any("other clients" in note for note in report["runs"][0]["notes"])


@pytest.mark.parametrize("reports_ids", [True, False])
def test_a_divergence_is_located(reports_ids):
    with FakeEngine(wrong_from=6, reports_ids=reports_ids) as engine, FakeEngine(k=0) as baseline:
        report = evaluate_server(engine.url, PROMPTS, baseline_url=baseline.url, max_new_tokens=NEW)
    run = report["runs"][0]
    assert run["identical_to_plain"] is False and len(run["divergences"]) == 3
    first = run["divergences"][0]
    assert (first["prompt"], first["position"]) == (0, 6)
    assert (first["token"], first["plain_token"]) == ((25, 24) if reports_ids else (chr(0x4E00 + 25), chr(0x4E00 + 24)))
    assert first["unit"] == ("token" if reports_ids else "character")


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_server_that_dies_midway_leaves_what_was_whole(concurrency, tmp_path):
    # Request 0 is the warm-up; request 5 answers the fifth prompt, or belongs to the second group of four.
    with FakeEngine(dies=(5, 2)) as engine:
        report = evaluate_server(engine.url, PROMPTS * 3, max_new_tokens=NEW, concurrency=concurrency)
    assert report["interrupted"] is True
    assert engine.url in report["interruption"]
    assert (report["prompts"]["count"], report["prompts"]["requested"]) == (4, 9)
    assert report["runs"][0]["draft_rounds"] == 16
    assert report["runs"][0]["mean_acceptance_length"] == TAU
    assert json.loads(write_report(report, tmp_path)[0].read_text())["interrupted"] is True


def test_a_baseline_that_dies_leaves_pairs_only():
    with FakeEngine() as engine, FakeEngine(k=0, dies=(3, 1)) as baseline:
        report = evaluate_server(engine.url, PROMPTS, baseline_url=baseline.url, max_new_tokens=NEW)
    assert report["interrupted"] is True
    assert [len(run["per_prompt"]["seconds"]) for run in report["runs"]] == [2, 2]


def test_nothing_whole_is_an_error():
    with FakeEngine(dies=(1, 1)) as engine, pytest.raises(EngineLostError, match="broke off|does not answer"):
        evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
    with pytest.raises(EngineLostError, match="does not answer.*Mend: start it"):
        evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)


def test_an_error_within_a_stream_is_told():
    with FakeEngine(fails=2) as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW)
    assert report["prompts"]["count"] == 1
    assert "EngineCore encountered an issue" in report["interruption"]


def test_ctrl_c_keeps_what_is_done():
    def stop(done: int, _) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with FakeEngine() as engine:
        report = evaluate_server(engine.url, PROMPTS, max_new_tokens=NEW, progress=stop)
    assert (report["prompts"]["count"], report["interruption"]) == (2, "Ctrl-C")


TOO_LONG = '{"error": {"message": "maximum context length is 8 tokens"}}'


@pytest.mark.parametrize(
    ("engine", "path", "model", "message"),
    [
        (FakeEngine(refuses={0: (400, TOO_LONG)}), "", None, "400.*context length is 8"),
        (FakeEngine(refuses={0: (404, "no such model")}), "", None, "404.*no such model"),
        (FakeEngine(), "", "large", "serves tiny, not 'large'"),
        (FakeEngine(), "/somewhere", None, "names no model"),
        (FakeEngine(flavour="llamacpp", metrics=False), "", None, "expected vllm or sglang"),
    ],
)
def test_refusals_are_shown(engine, path, model, message):
    with engine, pytest.raises(EngineError, match=message):
        evaluate_server(engine.url + path, PROMPTS, model=model)


def test_servers_must_differ_in_the_draft():
    with FakeEngine() as one, FakeEngine(k=0) as plain:
        with pytest.raises(EngineError, match="drafts 3 tokens a round; expected plain"):
            evaluate_server(one.url, PROMPTS, baseline_url=one.url)
        with pytest.raises(EngineError, match="decodes without a draft"):
            evaluate_server(plain.url, PROMPTS, baseline_url=plain.url)
        report = evaluate_server(plain.url, PROMPTS, max_new_tokens=NEW)
        assert [(run["id"], run["draft"]) for run in report["runs"]] == [("plain", "none")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "localhost:8000"}, "expected one like http://localhost:8000"),
        ({"url": "http://localhost:99999999"}, "expected one like"),
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"max_new_tokens": 1}, "at least 2 tokens"),
        ({"concurrency": 0}, "at least 1 prompt"),
    ],
)
def test_what_cannot_be_asked(changes, message):
    arguments = {"url": "http://127.0.0.1:9", "prompts": PROMPTS, "max_new_tokens": NEW, **changes}
    with pytest.raises(EngineError, match=message):
        evaluate_server(arguments.pop("url"), arguments.pop("prompts"), **arguments)


def test_figures_of_given_answers():
    # The first delivery of the second prompt brings two tokens: three are left to be timed.
    counts = [EngineCounts(2, 6, 3, (2, 1, 0)), EngineCounts(1, 3, 3, (1, 1, 1))]
    drafted = [
        Answer((1, 2, 3, 4, 5), None, 5, 0.1, 2.0, (1, 2, 2), (1.5, 0.5), counts[0]),
        Answer((1, 2, 3, 4, 5), None, 5, 0.3, 1.0, (2, 3), (1.0,), counts[1]),
    ]
    plain = [
        Answer((1, 2, 3, 4, 5), None, 5, 0.1, seconds, counts=EngineCounts(0, 0, 0, (), 4)) for seconds in (4.0, 8.0)
    ]
    runs = [EngineRun("plain", "plain", "none", 0), EngineRun("d", "d", "eagle3", 3)]
    for run, answers in zip(runs, (plain, drafted), strict=True):
        run.groups = [Group((answer,)) for answer in answers]
    report = engine_report(
        runs,
        [EnginePrompt((1,), "a"), EnginePrompt((2,), "b")],
        **{"sampling": Sampling(), "max_new_tokens": 5, "concurrency": 1, "target": {}, "device": {}},
        engine={"name": "vllm", "version": "0"},
    )
    run = report["runs"][1]
    assert run["speedup"] == pytest.approx((7 / 3) / (8 / 12))
    assert run["mean_acceptance_length"] == 1 + 6 / 3
    assert run["per_position_acceptance"] == [1, 2 / 3, 1 / 3]
    assert run["iterations"] is None
    speeds = {"median": 2.5, "min": 2.0, "max": 3.0, "pooled": pytest.approx(7 / 3), "total": pytest.approx(7 / 3)}
    assert run["tokens_per_second"] == speeds
    assert run["end_to_end_tokens_per_second"] == pytest.approx(10 / 3.4)
    assert (run["ttft"], run["itl"]["p50"]) == (pytest.approx(0.2), 1.0)
    assert run["categories"]["b"]["speedup"] == pytest.approx(3 / (4 / 8))
    assert run["categories"]["b"]["mean_acceptance_length"] == 4
    low, high = run["intervals"]["mean_acceptance_length"]
    assert (low, high) == (2.5, 4.0)
    turns = [EnginePrompt((1,), "a", "talk"), EnginePrompt((2,), "b", "talk")]
    together = engine_report(
        runs,
        turns,
        **{"sampling": Sampling(), "max_new_tokens": 5, "concurrency": 1, "target": {}, "device": {}},
        engine={"name": "vllm", "version": "0"},
    )
    assert together["runs"][1]["intervals"]["mean_acceptance_length"] is None  # One unit: nothing to resample.


def test_prometheus_text():
    lines = [
        "# HELP a_total x",
        'a_total{m="x,\\"y\\"",engine="0"} 3.0',
        'a_total{m="z",engine="1"} 4e0 1700000',
        "b 2",
    ]
    metrics = Metrics.parse("\n".join([*lines, "a_created 9", ""]))
    assert metrics.total("a") == 7 and metrics.total("b") == 2 and metrics.total("c") is None
    assert metrics.by_label("a", "engine") == {"0": 3.0, "1": 4.0}
    assert metrics.samples[0][1]["m"] == 'x,\\"y\\"'
