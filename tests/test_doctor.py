"""`drafttrain doctor` as a whole: healthy runs of every kind pass clean, drafts from elsewhere, the command line, and
the target, speed and figures that need no run.
"""

import json
import os
import shutil
from collections import Counter

import pytest
import torch

from drafttrain.doctor import CHECKS, DoctorError, diagnose, last_line, names_of
from drafttrain.doctor_data import thinks
from drafttrain.doctor_speed import reason
from drafttrain.doctor_spread import divergence
from drafttrain.doctor_steps import replay
from drafttrain.doctor_words import clearly_better, differ
from drafttrain.evaluate.cost import speedup_at
from drafttrain.target import load_target
from tests.tiny_doctor import copied, edit, examine, fails, healthy_run, quiet, write_chat_target
from tests.tiny_models import make_model, make_tokenizer, save
from tests.training.tiny_run import make_target

UNMEASURED = {
    "eagle3": set(),
    "medusa": {"layers", "rope"},
    "kd": {"layers"},
}
"""What a kind of draft does not have."""


@pytest.mark.parametrize("method", UNMEASURED)
def test_a_healthy_run_passes_clean(tmp_path, method):
    run = copied(tmp_path, method)
    shutil.copytree(run.draft, run.path / "export" / "vllm", ignore=shutil.ignore_patterns("master"))
    found = diagnose(run.path, make_target(run.recipe()), run.recipe(), samples=6, say=quiet)
    statuses = {name: result.status for name, result in found.results.items()}
    expected = {name: "NOT MEASURED" if name in UNMEASURED[method] else "PASS" for name in CHECKS}
    assert statuses == expected, {name: one.evidence for name, one in found.results.items() if one.status == "FAIL"}
    assert found.exit_status == 0
    assert all(result.evidence and not result.mend for result in found.results.values())
    assert "drafttrain evaluate RUN" in last_line(found, "RUN", True)


def test_a_draft_from_elsewhere_is_measured_without_its_data(tmp_path):
    """As from the hub: nothing but weights and config; the prompts are built-in ones."""
    run = copied(tmp_path)
    shutil.copytree(run.draft, tmp_path / "draft", ignore=shutil.ignore_patterns("master", "drafttrain.json"))
    recipe = run.recipe()
    found = diagnose(tmp_path / "draft", make_target(recipe), samples=2, say=quiet)
    unknown = ("fingerprint", "dtype", "template", "mask", "thinking", "drift")
    assert all(found.results[name].status == "NOT MEASURED" for name in unknown)
    assert "no prepared training data" in found.results["drift"].evidence[0]
    assert {found.results[name].status for name in ("vocabulary", "layers", "norm", "rope", "parity")} == {"PASS"}


def test_the_command_line_prints_json_and_exits_with_1_on_a_failure(tmp_path, cli):
    run = copied(tmp_path)
    status, out, err = cli("doctor", run.path, "--only", "layers,mask", "--samples", "4", "--json")
    found = json.loads(out)
    assert (status, found["exit_status"], list(found["checks"])) == (0, 0, ["mask", "layers"])
    assert found["checks"]["mask"]["numbers"]["shares"]["train"] > 0.5
    ids = json.loads((run.draft / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    edit(run.draft / "config.json", eagle_aux_hidden_state_layer_ids=[k + 1 for k in ids], eagle_config=None)
    status, out, err = cli("doctor", run.path, "--only", "layers", "--samples", "4")
    assert status == 1
    assert "FAIL" in out and "Mend: " in out and "Next: drafttrain export" in out
    assert "Traceback" not in err


def test_unknown_checks_and_drafts_without_a_target_are_refused(tmp_path, cli):
    assert names_of("rope,mask") == ["mask", "rope"]
    with pytest.raises(DoctorError, match="did you mean layers"):
        names_of("layer")
    status, _, err = cli("doctor", tmp_path)
    assert status == 1 and "--target" in err


# The target.


def test_another_target_is_named(tmp_path):
    run = copied(tmp_path)
    write_chat_target(tmp_path / "other", initializer_range=0.5)
    fails(examine(run, "fingerprint", load_target(str(tmp_path / "other"))), "another target", "other")


def test_another_tokenizer_is_named_although_the_draft_does_not_load(tmp_path):
    run = copied(tmp_path)
    save(tmp_path / "other", make_model("Llama", max_position_embeddings=256), make_tokenizer(80))
    target = load_target(str(tmp_path / "other"))
    found = diagnose(run.path, target, run.recipe(), only=["fingerprint", "layers"], samples=2, say=quiet)
    fails(found.results["fingerprint"], "does not load", "tokenizer")
    assert found.results["layers"].status == "NOT MEASURED"
    assert "another tokenizer" in " ".join(found.results["fingerprint"].evidence[1:])


def test_another_template_and_another_dtype_are_named(tmp_path):
    run = copied(tmp_path)
    home = healthy_run() / "target"
    shutil.copytree(home, tmp_path / "other")
    template = (home / "chat_template.jinja").read_text()
    (tmp_path / "other" / "chat_template.jinja").write_text(template.replace("assistant", "w1"))
    target = load_target(str(tmp_path / "other"))
    evidence = fails(examine(run, "fingerprint", target)).evidence
    assert any("chat template" in line for line in evidence)
    fails(examine(run, "dtype", load_target(str(home), dtype="bfloat16")), "float32", "bfloat16")


def test_a_target_that_chooses_otherwise_is_named(tmp_path):
    """As after quantisation: the same files but for noise on the weights."""
    run = copied(tmp_path)
    edit(run.draft / "drafttrain.json", target_dtype=None, target_quantization=None)
    target = make_target(run.recipe())
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    result = fails(examine(run, "dtype", target), "chooses otherwise")
    assert 0 < result.numbers["same_choice"] < 0.95
    edit(run.draft / "drafttrain.json", target_quantization="awq")
    fails(examine(run, "dtype"), "quantisation awq", "none")


def test_without_a_store_greedy_answers_are_the_record(tmp_path):
    run = copied(tmp_path)
    shutil.rmtree(run.prepared / "features")
    result = examine(run, "dtype")
    assert result.status == "PASS" and result.numbers["same_choice"] == 1.0
    assert "greedy training answers" in result.evidence[-1]


# Speed.


def entry(**changes):
    base = {
        "draft": "eagle3",
        "checkpoint": "elsewhere/run/draft",
        "trained": True,
        "lossy": False,
        "tree": None,
        "concurrency": 1,
        "k": 3,
        "o": 0.02,
    }
    base |= {"per_position_acceptance": [0.7, 0.5, 0.35], "mean_acceptance_length": 2.55, "c": 0.05, "v": 1.1}
    run = base | changes
    cost = run["v"] + run["k"] * run["c"] + run["o"]
    return {"speedup": run["mean_acceptance_length"] / cost, **run}


def report_in(folder, run, *runs):
    """A report about the run's draft."""
    fingerprint = json.loads((run.draft / "drafttrain.json").read_text())["target_fingerprint"]
    report = {"schema": 1, "target": {"fingerprint": fingerprint}, "runs": runs}
    (folder / "report.json").write_text(json.dumps(report))


EVEN = {"per_position_acceptance": [0.5, 0.45, 0.4], "mean_acceptance_length": 2.35}
SLOW = {
    "drafting is dear": {"c": 0.9},
    "verifying 4 tokens costs": {"v": 2.6, **EVEN},
    "compute-bound": {"v": 2.6, "concurrency": 32, **EVEN},
    "the rest of the loop": {"o": 1.6},
    "acceptance is too low": {"per_position_acceptance": [0.05, 0.0, 0.0], "mean_acceptance_length": 1.05, "v": 1.2},
    "too many drafts": {"k": 7, "c": 0.3, "per_position_acceptance": [0.8, 0.5] + [0.05] * 5,
                        "mean_acceptance_length": 2.55, "v": 1.1},
}  # fmt: skip


@pytest.mark.parametrize("why", SLOW)
def test_a_report_slower_than_plain_decoding_names_the_reason(tmp_path, why):
    run = copied(tmp_path)
    folder = run.path / "evaluation" / "test"
    folder.mkdir(parents=True)
    slow = entry(**SLOW[why])
    assert slow["speedup"] < 1
    plain = {"draft": "none", "trained": False, "speedup": None}
    worse = entry(**SLOW[why] | {"o": 3.0})
    report_in(folder, run, plain, worse, slow)
    result = fails(examine(run, "speed"), why)
    assert result.numbers["runs"][0]["speedup"] == slow["speedup"]
    report_in(folder, run, plain, slow, entry(concurrency=slow["concurrency"]))
    assert examine(run, "speed").status == "PASS"


def test_a_report_about_an_earlier_draft_does_not_count(tmp_path):
    run = copied(tmp_path)
    folder = run.path / "evaluation" / "test"
    folder.mkdir(parents=True)
    report_in(folder, run, {"draft": "none", "trained": False, "speedup": None}, entry(o=3.0))
    os.utime(folder / "report.json", (0, 0))
    assert "measured here" in str(examine(run, "speed").evidence)


def test_a_smaller_k_is_named_with_what_it_would_give():
    slow = entry(**SLOW["too many drafts"])
    why, mend = reason(slow)
    line = [1 + 0.1 * i / 7 for i in range(8)]
    best = max(range(1, 8), key=lambda k: speedup_at(slow["per_position_acceptance"], k, 0.3, line, 0.02))
    assert f"K = {best} would give" in why and mend.startswith(f"--k {best} ")


# Figures by hand.


def test_divergence_in_bits():
    assert divergence(Counter("aab"), Counter("aab")) == pytest.approx(0)
    assert divergence(Counter("aa"), Counter("bb")) == pytest.approx(1)
    # p = (1, 0), q = (1/2, 1/2), mean (3/4, 1/4): (log2 4/3 + log2(2/3) / 2 + log2(2) / 2) / 2
    assert divergence(Counter("a"), Counter("ab")) == pytest.approx(0.311278, abs=1e-5)


def test_replay_counts_what_the_loop_would_accept():
    # Text x[0..7], prompt of 2: the prefill gives x[2]; rows 1.. draft x[3]..; 6 new tokens.
    hits = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0]]).bool()
    # Row 1: both hit -> at 5; row 4: one hit -> at 7, where no token is left to draft for.
    assert replay(hits, prompt=2, count=6, k=2) == 3
    assert replay(torch.zeros_like(hits), prompt=2, count=6, k=2) == 0


def test_only_clear_differences_count():
    hits = torch.zeros(1000).bool()
    better = hits.clone()
    better[:9] = True
    assert not clearly_better(better, hits)  # 9 of 9: z = 3 exactly.
    better[:10] = True
    assert clearly_better(better, hits)
    assert not clearly_better(hits, better)
    assert differ(50, 100, 80, 100) and not differ(5, 10, 8, 10) and not differ(0, 0, 8, 10)


def test_an_empty_thinking_block_is_no_reasoning():
    assert thinks("<think>\nso\n</think>\n\nyes") and thinks("<think> it is cut")
    assert thinks("<|channel|>analysis<|message|>hm<|end|>")
    assert not thinks("<think>\n\n</think>\n\nyes") and not thinks("no tags")
