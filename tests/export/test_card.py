"""The model card: figures of the report that belongs to the draft, what it was made of, nothing that is not known."""

import copy
import json
import os
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from drafttrain.data.prepare import content_mark, prepare
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.base import tokenizer_hash
from drafttrain.evaluate.report import write_report
from drafttrain.export.base import ExportError
from drafttrain.export.card import FILE
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.recipe import parse_recipe
from tests.drafts.test_medusa import make_heads
from tests.evaluate.report_examples import make_report
from tests.tiny_drafts import make_draft
from tests.tiny_models import V
from tests.tiny_students import trained
from tests.training.tiny_run import make_target, prompt_rows, settings, write_rows

FP32 = torch.float32
LATER = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run as training leaves it, its draft made at random: (run, target, draft)."""
    root = tmp_path_factory.mktemp("card")
    values = settings(root, learning_rate=0.002)
    write_rows(root / "prompts.jsonl", prompt_rows(6, seed=6))
    values["data"]["validation"] = [{"path": str(root / "prompts.jsonl")}]
    values["data"]["regenerate"] = {"max_new_tokens": 4, "temperature": [0.0, 0.5], "splits": ["validation"]}
    values["data"]["train"].append({"path": str(root / "validation.jsonl"), "weight": 0.5})
    recipe = parse_recipe(values, root)
    target, folder = make_target(recipe), RunFolder(root / "runs" / "one")
    folder.claim(recipe)
    prepared = prepare(recipe, folder, target, say=lambda message: None)
    draft = make_draft(target, prepared.vocab.ids, prepared.layers)
    save_draft(draft.requires_grad_(False), target, folder.draft, FP32, validation={"step": 640})
    return folder, target, draft


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run, for one test."""
    folder, target, draft = made
    shutil.copytree(folder.path, tmp_path / "runs" / "one")
    return RunFolder(tmp_path / "runs" / "one"), target, copy.deepcopy(draft)


def report_of(folder, target, name="test", later=LATER, changes=None):
    """The example report as if measured on that run, so many seconds after its draft was saved."""
    report = make_report()
    report["target"] = {"name": target.title, "fingerprint": target.fingerprint}
    for row in report["runs"]:
        if row["draft"] == "eagle3" and row["trained"]:
            row["checkpoint"] = str(folder.draft)
    path, _ = write_report(report | (changes or {}), folder.path / "evaluation" / name)
    time = (folder.draft / "model.safetensors").stat().st_mtime + later
    os.utime(path, (time, time))
    return report


def card(folder, target, output, engine="vllm", **options):
    export_draft(folder.draft, target, output, k=3, engine=engine, **options)
    return (output / FILE).read_text()


def rows_of(text):
    """The cells of the card's table, by the label and the decoding of each row."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return {(cells[0], cells[1]): cells for cells in lines}


def test_the_hub_reads_it(run, tmp_path):
    folder, target, _ = run
    card(folder, target, tmp_path / "out")
    found = ModelCard.load(tmp_path / "out" / FILE).data
    assert found.base_model == "target" and found.library_name == "drafttrain"
    assert found.pipeline_tag == "text-generation" and found.tags == ["speculative-decoding", "eagle3"]
    assert found.license is None and found.datasets is None


def test_figures_are_the_report_s(run, tmp_path):
    folder, target, _ = run
    report = report_of(folder, target)
    text = card(folder, target, tmp_path / "out")
    rows = rows_of(text)
    expected = [row for row in report["runs"] if row["draft"] == "ngram" or row["checkpoint"] == str(folder.draft)]
    assert len(rows) == len(expected) == 9
    for row in expected:
        sampled = row["sampling"]["temperature"] > 0
        mode = f"Sampled at temperature 0.8, {row['mode'].replace('_', '-')} drafts" if sampled else "Greedy decoding"
        label, _, requests, tau, positions, rate, speedup, same = rows[row["label"], mode]
        low, high = row["intervals"]["mean_acceptance_length"]
        assert tau == f"{row['mean_acceptance_length']:.3f} [{low:.2f}, {high:.2f}]"
        assert positions.split() == [f"{value:.3f}" for value in row["per_position_acceptance"]]
        assert rate == f"{100 * row['acceptance_rate']:.1f}%" and requests == "1"
        low, high = row["intervals"]["speedup"]
        assert speedup == f"{row['speedup']:.2f}x [{low:.2f}, {high:.2f}]"
        assert same == ("–" if sampled else "2 diverge" if row["divergences"] else "identical")
    assert "on 12 prompts (stdlib-heldout), 112 new tokens each, on 2 x86 cores in bfloat16. 0.0% of" in text
    assert "certificate: passed (4 checks, control failed as it must)." in text
    assert "Weights stored in float32; measured in bfloat16." in text


def test_the_newest_report_counts_where_it_is_about_this_very_draft(run, tmp_path):
    folder, target, _ = run
    cases = {
        "older than the draft": {},
        "of another target": {"target": {"name": "x", "fingerprint": "0"}},
        "of another draft": {"runs": [row for row in make_report()["runs"] if row["draft"] != "ngram"]},
        "of another schema": {"schema": 2},
    }
    for name, changes in cases.items():
        report_of(folder, target, name, LATER if changes else -LATER, changes)
    text = card(folder, target, tmp_path / "out")
    assert "Not measured: the run's reports are older than this draft, or about another." in text
    assert not rows_of(text) and "certificate:" not in text
    prompts = {"name": "second", "count": 5, "max_new_tokens": 7}
    report_of(folder, target, "second", 2 * LATER, {"prompts": prompts})
    report_of(folder, target, "first")
    text = card(folder, target, tmp_path / "out")
    assert "on 5 prompts (second), 7 new tokens each, on 2 x86 cores in bfloat16.\n" in text
    shutil.rmtree(folder.path / "evaluation")
    assert "the run has no evaluation report" in card(folder, target, tmp_path / "out")


def test_a_moved_run_keeps_its_figures(run, tmp_path):
    folder, target, _ = run
    report_of(folder, target)
    (tmp_path / "elsewhere").mkdir()
    folder.path.rename(tmp_path / "elsewhere" / "one")
    assert rows_of(card(RunFolder(tmp_path / "elsewhere" / "one"), target, tmp_path / "out"))


def test_what_it_was_made_of(run, tmp_path):
    folder, target, draft = run
    text = card(folder, target, tmp_path / "out", dtype=torch.float16)
    manifest = json.loads((folder.prepared / "manifest.json").read_text())
    audit = manifest["audit"]["train"]
    assert f"Target: target, fingerprint sha256 {target.fingerprint}." in text
    assert tokenizer_hash(target.tokenizer) in text
    entries = (("train", "train", ""), ("train", "validation", ", weight 0.5"), ("validation", "prompts", ""))
    for split, name, share in entries:
        mark = content_mark(target.folder.parent / f"{name}.jsonl")
        assert f"- Data ({split}): {name}.jsonl{share}, sha256 {mark}." in text
    assert f"- train: {audit['conversations']} conversations, {audit['tokens']} tokens, " in text
    assert "generated by the target itself (validation), temperature 0, 0.5." in text
    assert "- The draft of step 640, the best on validation data." in text
    layers = ", ".join(f"hs[{k}]" for k in draft.feature_layers)
    assert f"drafts tokens for target from {layers}, " in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["method"] == "eagle3" and recipe["training"]["learning_rate"] == 0.002
    assert "logging_steps" in recipe["training"] and "seed" not in recipe["training"]
    covered = manifest["coverage"]["validation"]
    assert f"Drafts {draft.draft_vocab_size} of the target's {V} words, {100 * covered:.1f}% of what" in text
    assert "texts of at most 2048 tokens" in text and "Positions: up to 128." in text
    assert "Weights stored in float16.\n" in text
    assert text.count("not known here") == 3
    assert str(target.folder.parent) not in text.split("## Acceptance")[1]


def test_serve_commands_of_each_engine_or_why_not(run, tmp_path):
    folder, target, draft = run
    text = card(folder, target, tmp_path / "out")
    serve = text.split("## Serve")[1].split("## Acceptance")[0]
    commands = re.findall(r"```\n(.*?)\n```", serve, re.S)
    assert [command.split()[0] for command in commands] == ["vllm", "python"]
    assert all(str(tmp_path / "out") in command and str(target.folder) in command for command in commands)
    assert "tensorrt-llm: give it this folder as its draft." in serve
    assert "llama.cpp: reads draft.gguf, which drafttrain export --engine llama.cpp writes." in serve
    other = make_draft(target, draft.draft_ids, draft.feature_layers, fc_norm=True, norm_before_residual=True)
    save_draft(other.requires_grad_(False), target, folder.draft, FP32)
    serve = card(folder, target, tmp_path / "out").split("## Serve")[1]
    assert re.search(r"^sglang: not served \(The draft has norm_before_residual .*\)\.$", serve, re.M)
    assert re.search(r"^llama\.cpp: not served \(The draft has fc_norm .*\)\.$", serve, re.M)


def test_other_kinds(run, tmp_path):
    folder, target, _ = run
    (tmp_path / "heads").mkdir()
    heads = make_heads(target, heads=2)
    heads.save_pretrained(tmp_path / "heads")
    export_draft(tmp_path / "heads", target, tmp_path / "m")
    text = (tmp_path / "m" / FILE).read_text()
    assert ModelCard(text).data.tags == ["speculative-decoding", "medusa"] and "2 Medusa heads that draft" in text
    assert "tensorrt-llm: reads another layout; drafttrain export --engine tensorrt-llm writes it." in text
    assert "Exported from a draft folder alone" in text and "Data: not known." in text
    save_draft(trained(target), target, tmp_path / "small", torch.bfloat16)
    export_draft(tmp_path / "small", target, tmp_path / "k")
    data = ModelCard.load(tmp_path / "k" / FILE).data
    assert (data.library_name, data.tags) == ("transformers", ["speculative-decoding", "distillation"])
    assert "A causal language model of 3 layers" in (tmp_path / "k" / FILE).read_text()


def test_the_target_s_licence_where_its_card_names_one(run, tmp_path):
    folder, target, _ = run
    (target.folder / FILE).write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    assert "- Target (target): apache-2.0. What its licence" in card(folder, target, tmp_path / "out")
    (target.folder / FILE).write_text("no front matter\n")
    assert "- Target (target): not known here." in card(folder, target, tmp_path / "out")


def test_a_card_is_written_with_the_whole_export_or_not_at_all(run, tmp_path):
    folder, target, draft = run
    before = card(folder, target, tmp_path / "out")
    draft.norm.weight.data[0] = float("nan")
    draft.save_pretrained(folder.draft / "master")
    with pytest.raises(ExportError, match="not finite"):
        export_draft(folder.draft, target, tmp_path / "out", torch.bfloat16)
    assert (tmp_path / "out" / FILE).read_text() == before
    export_draft(tmp_path / "out", target, tmp_path / "again")
    assert "Exported from a draft folder alone" in (tmp_path / "again" / FILE).read_text()
