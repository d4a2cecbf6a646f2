"""Quantised small drafts beside the full-precision one in one evaluation, and the drafts and kinds that are refused."""

import json

import pytest

from drafttrain.drafts import kd
from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.small_model import prune_layers
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.run import draft_candidates
from drafttrain.evaluate.runner import evaluate
from drafttrain.plan import measured_runs
from drafttrain.recipe import EvaluationConfig
from tests.tiny_drafts import make_draft, make_target
from tests.tiny_models import make_model, make_tokenizer, save, tokens

PROMPTS = [row.tolist() for row in tokens(2, 6)]
SETTINGS = EvaluationConfig(quantize=["int8", "int4"], k=[2, 3])


@pytest.fixture(scope="module")
def target():
    return make_target("Gemma3", intermediate_size=64, tie_word_embeddings=True, tokenizer=make_tokenizer())


@pytest.fixture
def draft(target):
    """The target itself: what its quantised copies lose in acceptance is their rounding alone."""
    return KdDraft(prune_layers(target, range(8)).model, tokenizer=target.tokenizer).attach(target)


def test_quantised_drafts_run_beside_the_plain_one(target, draft, monkeypatch):
    """Once quantised, whatever the number of K; the same greedy text; acceptance only as far as rounding spoils it."""
    done, real = [], kd.quantized
    monkeypatch.setattr(kd, "quantized", lambda model, kind: done.append(kind) or real(model, kind))
    candidates = draft_candidates("kd", draft, "folder", target, SETTINGS)
    options = {"ngram": False, "certificate": False, "max_new_tokens": 40, "stop_ids": ()}
    report = evaluate(target, candidates, PROMPTS, k=SETTINGS.k, **options)
    assert done == ["int8", "int4"]
    labels = ["plain", *(f"{name} k={k}" for name in ("kd", "kd int8", "kd int4") for k in (2, 3))]
    assert [run["label"] for run in report["runs"]] == labels
    assert [run["quantization"] for run in report["runs"]] == [None, None, None, "int8", "int8", "int4", "int4"]
    assert [run["label"] for run in measured_runs(report, "kd", "folder").values()] == ["kd k=2", "kd k=3"]
    runs = {run["label"]: run for run in report["runs"]}
    assert all(run["identical_to_plain"] for run in report["runs"][1:])
    assert all(run["draft"] == "kd" and run["checkpoint"] == "folder" for run in report["runs"][1:])
    whole, int8, int4 = (runs[f"{name} k=3"]["acceptance_rate"] for name in ("kd", "kd int8", "kd int4"))
    assert whole == 1.0 > int8 > int4 > 0.1


def test_a_draft_vocabulary_is_quantised_too(target, draft):
    draft = KdDraft(draft.student, tokens(1, 99)[0].unique(), target.tokenizer).attach(target)
    candidates = draft_candidates("kd", draft, "folder", target, SETTINGS)
    options = {"ngram": False, "certificate": False, "max_new_tokens": 20, "stop_ids": ()}
    report = evaluate(target, candidates, PROMPTS, k=[2], **options)
    assert [run["identical_to_plain"] for run in report["runs"]] == [None, True, True, True]


def test_other_drafts_are_refused(target):
    with pytest.raises(EvaluationError, match=r"--quantize is for small models \(method kd\), and mine is eagle3"):
        draft_candidates("mine", make_draft(target), "folder", target, SETTINGS)


def test_the_command(cli, tmp_path):
    model = save(tmp_path / "model", make_model("Llama", max_position_embeddings=256))
    options = ["--target", model, "--k", "1", "--max-new-tokens", "6", "--num-prompts", "1", "--json"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2 w3"}\n')
    options += ["--prompts", prompts, "--output", tmp_path / "out"]
    for verb in ("evaluate", "compare"):
        status, out, err = cli(verb, model, *options, "--quantize", "int8, int4")
        assert status == 0, err
        labels = [run["label"].removeprefix("model").removeprefix("kd") for run in json.loads(out)["runs"]]
        assert labels == ["plain", "n-gram k=1", " k=1", " int8 k=1", " int4 k=1"]
    status, out, err = cli("evaluate", model, *options, "--quantize", "int3")
    assert status == 1 and "quantize" in err and "int8" in err and "Traceback" not in err
