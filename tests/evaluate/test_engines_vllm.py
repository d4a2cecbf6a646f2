"""In-process vLLM by another Python: the protocol with a stub in its place, and the worker's counting."""

import ast
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafttrain.data import engine_process
from drafttrain.data.http_client import EngineError
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.engine_run import evaluate_in_vllm
from drafttrain.evaluate.engines import EngineDraft, evaluate_vllm
from drafttrain.evaluate.runner import Prompt
from drafttrain.export.medusa import write_medusa
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import EvaluationConfig
from tests.load_script import load_script
from tests.tiny_drafts import make_target
from tests.tiny_medusa import make_heads
from tests.tiny_models import V, make_tokenizer
from tests.training.tiny_run import prompt_rows, write_rows

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
NEW = 10

# Accepts 2, 3, 0, 2, .. of k = 3: four rounds, 7 accepted, for 10 tokens. A round takes 1 s, the prefill .5 s.
STUB = """#!{python}
import json, os, sys, time
job = json.load(open(sys.argv[-1]))
spec = job["llm"].get("speculative_config")
mode = {mode!r} if spec else "fine"
with open({seen!r}, "a") as seen:
    seen.write(json.dumps({{"argv": sys.argv[1:], "job": job, "env": dict(os.environ)}}) + "\\n")
out = open(job["output"], "a")
def write(**line):
    out.write(json.dumps(line) + "\\n")
    out.flush()
if mode == "fails":
    print("ValueError: the draft's vocab_size is 7")
    sys.exit(3)
if mode == "silent":
    time.sleep(60)
if mode == "error":
    write(kind="error", message="cannot import vllm")
    sys.exit(1)
write(kind="engine", version="0.32.0", torch="2.13.0", python="3.11", device="CPU", threads=2)
done = 0
for first in range(0, len(job["prompts"]), job["group"]):
    rows = []
    for index, prompt in enumerate(job["prompts"][first : first + job["group"]], first):
        if mode == "dies" and done == 2:
            out.write('{{"kind": "gro')
            out.flush()
            os._exit(9)
        count = job["sampling"]["max_tokens"]
        tokens = [sum(prompt) + i for i in range(count)]
        rounds = 4 if spec else count - 1
        rows.append(dict(index=index, tokens=tokens, ttft=0.5, seconds=float(rounds)))
        done += 1
    n = len(rows) if spec else 0
    steps = 5 if spec else job["sampling"]["max_tokens"]
    counters = dict(draft_rounds=4 * n, drafted=12 * n, accepted=7 * n, iterations=steps)
    counters["per_position"] = [3 * n, 3 * n, n]
    write(kind="group", prompts=rows, counters=counters)
write(kind="end")
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # Where the folder of a failed worker is left.

    def make(mode: str = "fine") -> Path:
        path = tmp_path / "python"
        path.write_text(STUB.format(python=sys.executable, mode=mode, seen=str(tmp_path / "seen.jsonl")))
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def draft(tmp_path) -> EngineDraft:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    return EngineDraft("eagle3", tmp_path / "draft")


def run(python, drafts, prompts=PROMPTS, **changes):
    return evaluate_vllm(python, "models/tiny", drafts, prompts, **{"max_new_tokens": NEW, **changes})


def test_a_report_of_plain_decoding_and_two_drafts(stub, draft, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    prompts = [Prompt(tuple(ids), "code") for ids in PROMPTS]
    ours = [[sum(ids) + i for i in range(NEW)] for ids in PROMPTS]
    ours[1][4] = 0
    report = run(stub(), [draft, EngineDraft("ngram")], prompts, model_impl="transformers", plain_tokens=ours)

    assert [one["id"] for one in report["runs"]] == ["plain", "vllm-eagle3-k3", "vllm-ngram-k3"]
    plain, eagle, ngram = report["runs"]
    assert (eagle["mean_acceptance_length"], eagle["per_position_acceptance"]) == (1 + 7 / 4, [3 / 4, 3 / 4, 1 / 4])
    assert (eagle["iterations"], eagle["draft_rounds"], eagle["acceptance_rate"]) == (12, 12, 7 / 12)
    assert eagle["speedup"] == 9 / 4 and eagle["tokens_per_second"]["pooled"] == 9 / 4
    assert eagle["intervals"]["speedup"] == [9 / 4, 9 / 4]
    assert (eagle["ttft"], eagle["end_to_end_tokens_per_second"]) == (0.5, 30 / 13.5)
    assert (eagle["draft"], eagle["trained"], ngram["draft"], ngram["trained"]) == ("eagle3", True, "ngram", False)
    assert eagle["categories"]["code"]["speedup"] == 9 / 4
    assert eagle["identical_to_plain"] is True
    assert eagle["against_ours"]["identical"] == 2
    found = eagle["against_ours"]["divergences"][0]
    assert (found["prompt"], found["position"], found["token"], found["plain_token"]) == (1, 4, 21, 0)
    assert (plain["iterations"], plain["mean_acceptance_length"], plain["speedup"]) == (27, 1.0, None)
    assert report["engine"]["version"] == "0.32.0" and report["device"]["threads"] == 2

    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert seen[0]["argv"][:2] == ["-I", str(engine_process.WORKER)]
    llm = {"model": "models/tiny", "model_impl": "transformers", "max_num_seqs": 1, "enable_prefix_caching": False}
    assert seen[0]["job"]["llm"] | llm == seen[0]["job"]["llm"] and "speculative_config" not in seen[0]["job"]["llm"]
    speculative = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(draft.folder)}
    assert seen[1]["job"]["llm"]["speculative_config"] == speculative
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    assert seen[2]["job"]["llm"]["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3, **lookup}
    assert seen[1]["job"]["sampling"] | {"ignore_eos": True, "max_tokens": NEW} == seen[1]["job"]["sampling"]
    assert seen[1]["env"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "PYTHONPATH" not in seen[1]["env"]
    assert not Path(seen[0]["argv"][-1]).exists()


def test_a_small_model_has_one_cache_group_with_the_target(stub, draft, tmp_path):
    small = EngineDraft("draft_model", draft.folder)
    report = run(stub(), [small, draft])
    assert [one["draft"] for one in report["runs"]] == ["none", "kd", "eagle3"]
    seen = [json.loads(line)["job"]["llm"] for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    # The baseline too, so that speedups compare like with like.
    assert [one["disable_hybrid_kv_cache_manager"] for one in seen] == [True, True, True]
    speculative = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(draft.folder)}
    assert seen[1]["speculative_config"] == speculative

    run(stub(), [small], plain=False, engine_options={"disable_hybrid_kv_cache_manager": False})
    run(stub(), [draft], plain=False)
    seen = [json.loads(line)["job"]["llm"] for line in (tmp_path / "seen.jsonl").read_text().splitlines()[3:]]
    assert seen[0]["disable_hybrid_kv_cache_manager"] is False
    assert "disable_hybrid_kv_cache_manager" not in seen[1]


def test_medusa_heads_over_a_smaller_vocabulary(stub, tmp_path):
    """vLLM takes their word list for a weight that is missing; of others it keeps looking for those."""
    drafts = []
    for name, words in (("whole", V), ("smaller", 20)):
        (tmp_path / name).mkdir()
        MedusaConfig(32, V, words, 2).save(tmp_path / name, torch.float32)
        drafts.append(EngineDraft("medusa", tmp_path / name, name))
    run(stub(), drafts[:1], k=[2])
    report = run(stub(), drafts[1:], k=[2])
    assert [one["draft"] for one in report["runs"]] == ["none", "medusa"]
    seen = [json.loads(line)["job"]["llm"] for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert all("model_loader_extra_config" not in one for one in seen[:2])
    assert all(one["model_loader_extra_config"] == {"enable_weights_track": False} for one in seen[2:])
    speculative = {"method": "medusa", "num_speculative_tokens": 2, "model": str(tmp_path / "smaller")}
    assert seen[3]["speculative_config"] == speculative and len(seen) == 4


@pytest.mark.parametrize(("asked", "run_at"), [([1, 2, 3, 5], [1, 2]), ([4], [2]), ([1], [1])])
def test_medusa_heads_are_asked_for_no_more_than_they_are(stub, tmp_path, asked, run_at):
    target = make_target(tokenizer=make_tokenizer())
    (tmp_path / "heads").mkdir()
    write_medusa(make_heads(target, heads=2), target, tmp_path / "heads", torch.float32)
    prompts = write_rows(tmp_path / "prompts.jsonl", prompt_rows(2, 0))
    said = []
    settings = EvaluationConfig(k=asked, prompts=str(prompts), max_new_tokens=NEW, ngram=False)
    report = evaluate_in_vllm(tmp_path / "heads", target, settings, python=stub(), say=said.append)
    assert [one["k"] for one in report["runs"]] == [0, *run_at]
    assert ("the draft has 2 heads" in " ".join(said)) is (asked != run_at)


def test_medusa_heads_are_not_drawn_from(stub, tmp_path):
    target = make_target(tokenizer=make_tokenizer())
    write_medusa(make_heads(target, heads=2), target, tmp_path, torch.float32)
    drawn = EvaluationConfig(k=[2], temperature=[0.8], draft_mode="probabilistic")
    with pytest.raises(EngineError, match=r"draft_mode is probabilistic; vLLM always drafts the likeliest.*one_hot"):
        evaluate_in_vllm(tmp_path, target, drawn, python=stub())


def test_sampling_and_groups(stub, draft, tmp_path):
    sampling = Sampling(0.8, seed=4, draft_mode="probabilistic")
    report = run(stub(), [draft], k=[3], sampling=sampling, concurrency=2)
    eagle = report["runs"][1]
    assert eagle["mode"] == "probabilistic" and eagle["identical_to_plain"] is None
    assert eagle["mean_acceptance_length"] == 1 + 7 / 4
    assert eagle["intervals"]["mean_acceptance_length"] is None  # The first two prompts were counted together.
    assert (eagle["tokens_per_second"]["pooled"], eagle["tokens_per_second"]["total"]) == (9 / 4, 9 / 2)
    job = json.loads((tmp_path / "seen.jsonl").read_text().splitlines()[1])["job"]
    assert job["llm"]["speculative_config"]["draft_sample_method"] == "probabilistic"
    assert (job["seeds"], job["group"], job["llm"]["max_num_seqs"]) == ([4, 5, 6], 2, 2)


def test_a_worker_that_dies_midway_leaves_what_was_whole(stub, draft):
    report = run(stub("dies"), [draft])
    assert report["interrupted"] is True and "status 9" in report["interruption"]
    assert [len(one["per_prompt"]["seconds"]) for one in report["runs"]] == [2, 2]
    assert report["runs"][1]["draft_rounds"] == 8


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fails", "status 3: ValueError: the draft's vocab_size is 7"),
        ("error", "cannot import vllm. Mend: make engine-venv"),
        ("silent", "no sign of life for 1 s"),
    ],
)
def test_a_draft_that_does_not_start_is_an_error(stub, draft, mode, message):
    with pytest.raises(EngineError, match=message) as caught:
        run(stub(mode), [draft], patience=1.0)
    folder = Path(str(caught.value).split("log in ")[1].rstrip(")"))
    assert (folder / "job.json").exists() and (folder / "log.txt").exists()


def test_ctrl_c_ends_the_worker_and_keeps_what_is_done(stub, draft):
    def stop(done: int, label: str) -> None:
        if done == 5 and "starting" not in label:
            raise KeyboardInterrupt

    report = run(stub(), [draft], progress=stop)
    assert report["interruption"] == "Ctrl-C" and report["prompts"]["count"] == 2


def test_what_cannot_be_run(stub, draft, tmp_path):
    with pytest.raises(EngineError, match="cannot be run .*Mend: make engine-venv"):
        run(tmp_path / "nowhere", [draft])
    with pytest.raises(EngineError, match=r"holds no config\.json"):
        run(stub(), [EngineDraft("eagle3", tmp_path)])
    with pytest.raises(EngineError, match=r"k is \[0\]"):
        run(stub(), [draft], k=[0])
    with pytest.raises(EngineError, match="named alike"):
        run(stub(), [draft, draft])
    with pytest.raises(EngineError, match="a prompt is text"):
        run(stub(), [draft], ["text"])


def test_the_worker_needs_nothing_but_vllm():
    tree = ast.parse(engine_process.WORKER.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert names - {"torch", "vllm"} <= sys.stdlib_module_names


class Engine:
    """What the worker reads of vllm.LLM: two engine cores' counters, and request times."""

    def __init__(self):
        self.rounds = 10

    def get_metrics(self):
        def metric(name, **values):
            return SimpleNamespace(name=name, **values)

        one = [metric("vllm:spec_decode_num_drafts", value=self.rounds), metric("vllm:num_requests_running", value=1)]
        other = [
            metric("vllm:spec_decode_num_drafts", value=1),
            metric("vllm:iteration_tokens_total", count=self.rounds),
        ]
        places = metric("vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.rounds, self.rounds - 10])
        return [*one, *other, places, metric("vllm:spec_decode_num_accepted_tokens", value=2 * self.rounds - 10)]

    def generate(self, prompts, sampling, use_tqdm):
        self.rounds += 4
        stats = SimpleNamespace(queued_ts=1.0, first_token_ts=1.5, last_token_ts=4.0)
        tokens = [prompts[0]["prompt_token_ids"][0], sampling[0]["seed"], sampling[0]["max_tokens"]]
        return [SimpleNamespace(metrics=stats, outputs=[SimpleNamespace(token_ids=tokens)])]


def test_the_worker_reads_differences():
    worker = load_script(engine_process.WORKER)
    vllm = SimpleNamespace(SamplingParams=dict)
    line = worker.run_group(Engine(), vllm, {"sampling": {"max_tokens": 3}}, 7, [[11]], [5])
    assert line["prompts"] == [{"index": 7, "tokens": [11, 5, 3], "ttft": 0.5, "seconds": 2.5}]
    counted = {"draft_rounds": 4, "drafted": 0, "accepted": 8, "iterations": 4, "per_position": [4, 4]}
    assert line["counters"] == counted
