"""The public API as the README shows it: load a target and a draft, generate, evaluate."""

import pytest
import torch

from drafttrain import evaluate, generate, load_draft, load_target
from drafttrain.export.folder import save_draft
from tests.tiny_drafts import LONG, make_draft
from tests.tiny_models import make_model, save


def test_from_a_folder_to_a_measured_speedup(tmp_path):
    folder = save(tmp_path / "target", make_model("Qwen3", **LONG))
    target = load_target(str(folder), dtype="float32")
    save_draft(make_draft(target), target, tmp_path / "run" / "draft", torch.float32)
    draft = load_draft(tmp_path / "run", target)

    prompts = [target.tokenizer(text)["input_ids"] for text in ("w1 w2 w3", "w4 w5 w6 w7")]
    plain = generate(target, prompts, max_new_tokens=12)
    done = generate(target, prompts, draft.proposer(target), k=3, max_new_tokens=12)
    assert [one.tokens for one in done.generations] == [one.tokens for one in plain.generations]
    assert done.generations[0].text == target.tokenizer.decode(done.generations[0].tokens, skip_special_tokens=True)
    assert 1 <= done.counts.mean_acceptance_length <= 4 and done.seconds.decode > 0

    report = evaluate(target, draft, ["w1 w2 w3", "w4 w5 w6 w7"], k=[1, 3], max_new_tokens=12)
    assert [run["label"] for run in report["runs"]] == ["plain", "n-gram k=1", "n-gram k=3", "eagle3 k=1", "eagle3 k=3"]
    best = report["runs"][-1]
    assert best["identical_to_plain"] and best["speedup"] > 0 and best["baseline"] == "plain"
    assert best["mean_acceptance_length"] == pytest.approx(1 + sum(best["per_position_acceptance"]))
