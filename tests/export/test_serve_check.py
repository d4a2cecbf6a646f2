"""`drafttrain serve-check`: a stand-in for vLLM that answers as our loop does, or a little otherwise."""

import json
import sys
from pathlib import Path

import pytest
import torch

from drafttrain.data.http_client import EngineError
from drafttrain.evaluate.agreement import columns, decode_one, proposer_as_served
from drafttrain.export.base import ExportError
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.export.serve_check import parted, parting_words, serve_check
from drafttrain.target import load_target
from tests.evaluate.fake_server import FakeEngine
from tests.tiny_drafts import agreeable_draft
from tests.tiny_medusa import make_heads
from tests.tiny_models import V, make_model, make_tokenizer, save

PROMPTS = [[1, 9, 30, 12, 55], [1, 17, 40], [1, 60, 61, 62, 63, 8, 21]]
K, COUNT = 3, 12

ENGINE = """#!{python}
import json, sys
job = json.load(open(sys.argv[-1]))
answers = json.load(open({answers!r}))
out = open(job["output"], "a")
def write(**line):
    out.write(json.dumps(line) + "\\n")
    out.flush()
write(kind="engine", version="0.32.0", torch="2.13.0", python="3.11", device="CPU", threads=2)
k = job["llm"]["speculative_config"]["num_speculative_tokens"]
for index, prompt in enumerate(job["prompts"]):
    a = answers[json.dumps(prompt)]
    row = dict(index=index, tokens=a["tokens"], ttft=0.5, seconds=1.0)
    counters = dict(draft_rounds=a["draft_rounds"], drafted=k * a["draft_rounds"], accepted=a["accepted"])
    write(kind="group", prompts=[row], counters=dict(counters, iterations=0, per_position=a["reached"]))
write(kind="end")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny target on disk and an EAGLE-3 export that is accepted now and then."""
    folder = tmp_path_factory.mktemp("served")
    target = load_target(str(save(folder / "target", make_model("Llama"), make_tokenizer())), dtype="float32")
    save_draft(agreeable_draft(target), target, folder / "draft", torch.float32)
    export_draft(folder / "draft", target, folder / "export", torch.float32, k=K)
    return target, folder / "export"


@pytest.fixture
def engine(tmp_path, exported):
    """Writes the stand-in; change(index, answer) alters what our loop would have answered."""

    def make(prompts=PROMPTS, change=lambda index, answer: None) -> Path:
        target, export = exported
        answers = {}
        for index, prompt in enumerate(prompts):
            answer = decode_one(target, prompt, proposer_as_served(export, target), K, COUNT)
            change(index, answer)
            answers[json.dumps(list(prompt))] = answer
        (tmp_path / "answers.json").write_text(json.dumps(answers))
        path = tmp_path / "python"
        path.write_text(ENGINE.format(python=sys.executable, answers=str(tmp_path / "answers.json")))
        path.chmod(0o755)
        return path

    return make


def check(exported, python, **changes):
    target, export = exported
    return serve_check(export, target, PROMPTS, k=K, max_new_tokens=COUNT, python=python, **changes)


def test_an_engine_that_answers_alike_passes(exported, engine):
    result = check(exported, engine())
    assert result["agrees"] is True and result["parted"] == [] and result["k"] == K
    assert 0 < result["ours"]["accepted"] < K * result["ours"]["draft_rounds"]
    assert result["theirs"] == result["ours"]
    assert parting_words(result) == ["every text and every prompt's accepted drafts are the same on both sides"]


def test_a_draft_that_is_read_otherwise_fails(exported, engine):
    def nothing_accepted(index, answer):
        answer |= {"draft_rounds": COUNT - 1, "accepted": 0, "reached": [0] * K}

    result = check(exported, engine(change=nothing_accepted))
    assert result["agrees"] is False
    assert result["theirs"]["tau"] == 1.0 < result["ours"]["tau"]
    assert [row["position"] for row in result["parted"]] == [None] * len(result["parted"]) != []
    (line,) = parting_words(result)
    assert "same text and other accepted drafts" in line and "drafttrain check" in line


def test_where_texts_part_is_told(exported, engine):
    def other_text(index, answer):
        if index == 1:
            answer["tokens"][4] += 1

    result = check(exported, engine(change=other_text))
    (row,) = result["parted"]
    assert (row["prompt"], row["position"]) == (1, 4)
    assert parting_words(result) == [
        "1 texts part, the first one (prompt 1) at token 4: ties in bfloat16, or another target"
    ]


def test_the_first_of_each_kind_is_named():
    ours = columns(
        [
            {"tokens": [1, 2, 3], "accepted": 1, "reached": [1, 0]},
            {"tokens": [4, 5, 6], "accepted": 1, "reached": [1, 0]},
        ]
    )
    theirs = columns(
        [
            {"tokens": [1, 2, 9], "accepted": 1, "reached": [1, 0]},
            {"tokens": [4, 5, 6], "accepted": 2, "reached": [1, 1]},
        ]
    )
    assert parted(ours, ours) == []
    assert parted(ours, theirs) == [
        {"prompt": 0, "position": 2, "accepted": [1, 1], "reached": [[1, 0], [1, 0]]},
        {"prompt": 1, "position": None, "accepted": [1, 2], "reached": [[1, 0], [1, 1]]},
    ]
    lines = parting_words({"parted": parted(ours, theirs)})
    assert len(lines) == 2 and "prompt 1) 1 ours and 2 theirs" in lines[1]


def test_a_server_is_asked_and_its_k_compared(exported):
    with FakeEngine(k=K, details=True) as server:
        result = check(exported, None, url=server.url)
        assert result["agrees"] is False and len(result["parted"]) == len(PROMPTS)
        assert result["engine"]["url"] == server.url
    with (
        FakeEngine(k=2, accepts=(2, 0), details=True) as server,
        pytest.raises(EngineError, match="2 tokens a round, 3"),
    ):
        check(exported, None, url=server.url)
    with FakeEngine(k=K, metrics=False) as server, pytest.raises(EngineError, match="does not tell what it accepted"):
        check(exported, None, url=server.url)


def test_what_the_engine_does_not_serve_is_refused_first(exported, tmp_path):
    target, _ = exported
    for name, sequential in (("plain", False), ("sequential", True)):
        (tmp_path / name).mkdir()
        make_heads(target, torch.arange(0, V, 2), heads=2, sequential=sequential).save_pretrained(tmp_path / name)
    with pytest.raises(ExportError, match="--k is 3 and the draft has 2 heads"):
        serve_check(tmp_path / "plain", target, PROMPTS, k=3, python=tmp_path)
    with pytest.raises(ExportError, match="sequential heads"):
        serve_check(tmp_path / "sequential", target, PROMPTS, python=tmp_path)


def test_the_verb(cli, exported, engine, tmp_path):
    target, export = exported
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w5 w6 w7", "w8 w9")))
    ids = [target.tokenizer(text)["input_ids"] for text in ("w5 w6 w7", "w8 w9")]
    arguments = ["serve-check", export, "--target", target.folder, "--prompts", rows, "--num-prompts", 2]
    arguments += ["--max-new-tokens", COUNT, "--k", K]
    status, out, _ = cli(*arguments, "--engine-python", engine(ids))
    assert status == 0 and out.splitlines()[-1] == "PASS" and "acceptance length" in out

    def less(index, answer):
        answer |= {"accepted": 0, "reached": [0] * K}

    status, out, _ = cli(*arguments, "--engine-python", engine(ids, less), "--json")
    assert status == 1 and json.loads(out)["agrees"] is False
    status, _, err = cli(*arguments, "--engine-python", tmp_path / "absent")
    assert status == 1 and "make engine-venv" in err
    status, _, err = cli("serve-check", export)
    assert status == 1 and "--target NAME_OR_PATH" in err
