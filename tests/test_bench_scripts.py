"""The scripts that hold our evaluator against other programs: their counts, and assisted generation."""

import json

import pytest
import torch

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.agreement import columns, decode_one, proposer_as_served
from drafttrain.export.base import ExportError
from drafttrain.target import load_target
from tests.load_script import load_script
from tests.tiny_drafts import make_draft
from tests.tiny_models import V, make_model, save

PROMPTS = [[1, 9, 30, 12, 55], [1, 17, 40], [1, 60, 61, 62, 63, 8, 21]]
K, COUNT = 3, 14


assisted = load_script("bench_assisted")


def test_rounds_are_counted_from_what_they_brought():
    # Token 1 is there; 4 + 1 + 3 more make 9. The round that crosses the line counts whole, those behind it do not.
    counted = assisted.counted_rounds([4, 1, 3, 4], k=3, count=7)
    assert counted == {"draft_rounds": 3, "accepted": 5, "reached": [2, 2, 1]}
    assert assisted.counted_rounds([4, 1, 3, 4], k=3, count=6)["draft_rounds"] == 2
    with pytest.raises(AssertionError, match="a round of 3 drafts brought 5 tokens"):
        assisted.counted_rounds([5], k=3, count=6)
    with pytest.raises(AssertionError, match="5 tokens arrived of 6"):
        assisted.counted_rounds([4], k=3, count=6)


def test_what_counts_as_a_tie():
    assert assisted.is_tie({"ulps": -2.0}, 2.0) is True
    assert assisted.is_tie({"ulps": 2.5}, 2.0) is False
    assert assisted.is_tie({"ulps": 0.5}, 0.0) is False
    assert assisted.is_tie({"ulps": None}, 2.0) is False


@pytest.fixture(params=["Llama", "Gemma3"])
def sides(request, tmp_path):
    """A tiny target (Gemma 3: windows of 4) and a draft of the same shape that often agrees with it."""
    target = load_target(str(save(tmp_path / "target", make_model(request.param))), dtype="float32")
    small = make_model(request.param)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return target, save(tmp_path / "draft", small)


def test_transformers_and_our_loop_have_the_same_rounds(sides):
    target, folder = sides
    assistant, shipped = assisted.load_assistant(folder, target, K)
    assert shipped == "transformers' own defaults"
    found = assisted.measure(target, PROMPTS, proposer_as_served(folder, target), assistant, K, COUNT)
    for name in ("tokens", "draft_rounds", "accepted", "reached"):
        assert found["theirs"][name] == found["ours"][name], name
    assert found["theirs"]["tokens"] == found["plain"]["tokens"]
    accepted, rounds = sum(found["ours"]["accepted"]), sum(found["ours"]["draft_rounds"])
    assert 0.2 < accepted / (K * rounds) < 0.9  # Neither all nor nothing, so that the counting is put to the test.
    same = assisted.compare_texts(target, PROMPTS, found, 0.0)
    assert same == {"differences": [], "steps_within": 0.0, "agrees": True}


def test_stops_are_ordinary_tokens(sides):
    target, folder = sides
    plain = [decode_one(target, prompt, None, K, COUNT) for prompt in PROMPTS]
    stop = plain[0]["tokens"][5]
    target.model.generation_config.eos_token_id = stop
    config = json.loads((folder / "generation_config.json").read_text())
    settings = {"eos_token_id": stop, "num_assistant_tokens": 7, "num_assistant_tokens_schedule": "heuristic"}
    (folder / "generation_config.json").write_text(json.dumps(config | settings))
    assistant, shipped = assisted.load_assistant(folder, target, K)
    assert "num_assistant_tokens 7" in shipped and "schedule heuristic" in shipped
    found = assisted.decode_assisted(target, assistant, PROMPTS[0], plain[0]["tokens"][0], K, COUNT)
    assert found["tokens"] == plain[0]["tokens"] and stop in found["tokens"][:-1]
    ours = decode_one(target, PROMPTS[0], proposer_as_served(folder, target), K, COUNT)
    assert found["reached"] == ours["reached"]


def test_differences_are_listed_with_their_margin(sides):
    target, _ = sides
    plain = columns([decode_one(target, prompt, None, K, COUNT) for prompt in PROMPTS])
    changed = [list(tokens) for tokens in plain["tokens"]]
    changed[1][4] = (changed[1][4] + 1) % 90
    found = assisted.compare_texts(
        target, PROMPTS, {"plain": plain, "ours": plain, "theirs": {"tokens": changed}}, within=2.0
    )
    (one,) = found["differences"]
    assert (one["side"], one["prompt"], one["position"]) == ("theirs", 1, 4)
    assert one["ulps"] > 2 and found["agrees"] is False
    timed = {
        "plain": plain | {"whole": [2.0] * 3},
        "ours": plain | {"whole": [COUNT * 1.0] * 3},
        "theirs": {"tokens": changed, "whole": [(COUNT - 1) * 3.0, (COUNT - 1) * 2.0, (COUNT - 1) * 4.0]},
    }
    lines = assisted.beside(timed, found, "x")
    assert lines[1:3] == [
        "texts, ours: 3 of 3 those of plain decoding",
        "texts, theirs: 2 of 3 those of plain decoding",
    ]
    assert lines[3].startswith("  theirs, prompt 1, token 4: +")
    assert "ours 3.00 times as fast as theirs (prompts 2.00..4.00)" in lines[4]


def test_an_eagle_draft_cannot_assist(tmp_path):
    target = load_target(str(save(tmp_path / "target", make_model("Llama"))), dtype="float32")
    (tmp_path / "eagle").mkdir()
    make_draft(target).shape.save(tmp_path / "eagle", torch.float32)
    with pytest.raises(DraftError, match="of kind eagle3; transformers assists with whole small models only"):
        assisted.main(tmp_path / "eagle", target=str(target.folder), output=tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_the_size_of_a_run_in_vllm(tmp_path):
    """Medusa heads: all of them unless fewer are asked for; what vLLM does not serve is refused first."""
    defaults = load_script("bench_vllm").defaults
    for name, sequential in (("plain", False), ("sequential", True)):
        (tmp_path / name).mkdir()
        MedusaConfig(32, V, 20, 2, sequential=sequential).save(tmp_path / name, torch.float32)
    assert defaults("medusa", tmp_path / "plain", None) == {"prompts": 64, "max_new_tokens": 64, "k": 2}
    assert defaults("eagle3", tmp_path / "plain", 7)["k"] == 3 and defaults("kd", tmp_path / "plain", None)["k"] == 4
    with pytest.raises(ExportError, match="--k is 3 and the draft has 2 heads"):
        defaults("medusa", tmp_path / "plain", 3)
    with pytest.raises(ExportError, match="sequential heads"):
        defaults("medusa", tmp_path / "sequential", None)


def test_texts_are_compared_whatever_holds_them():
    report = {"runs": [{"per_prompt": {"tokens": [(1, 2), (1, 3)]}}]}
    texts = load_script("bench_vllm").texts
    assert texts({"tokens": [[1, 2], [1, 4]]}, report) == "drafted texts: 1 of 2 the same in both"
