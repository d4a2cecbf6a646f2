"""`drafttrain publish`: what is uploaded, byte by byte, to a hub of our own, and everything that is refused before."""

import copy
import json
import os
import re
import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard, constants

from drafttrain import publish as publishing
from drafttrain.data.run_folder import RunFolder
from drafttrain.evaluate.report import command_line, write_report
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.publish import Exported, PublishError, build_folder, check_repo, notes_of, with_repo
from drafttrain.recipe import parse_recipe
from drafttrain.target import load_target
from tests.evaluate.report_examples import make_report
from tests.fake_hub import FakeHub
from tests.tiny_drafts import agreeable_draft
from tests.training.tiny_run import settings

REPO = "me/draft"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a random draft, an evaluation report and an export: (folder of the run, target)."""
    root = tmp_path_factory.mktemp("publish")
    recipe = parse_recipe(settings(root), root)
    target, run = load_target(**recipe.target.model_dump()), RunFolder(root / "run")
    (target.folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    run.claim(recipe)
    save_draft(agreeable_draft(target), target, run.draft, torch.float32)
    report_of(run, target)
    export_draft(run.draft, target, run.path / "export" / "vllm", k=3)
    return run.path, target


def report_of(run, target, later=1, **changes):
    """The example report as if measured on that run, so many seconds after its draft was saved."""
    report = copy.deepcopy(make_report()) | {"target": {"name": target.title, "fingerprint": target.fingerprint}}
    for row in report["runs"]:
        if row["draft"] == "eagle3" and row["trained"]:
            row["checkpoint"] = str(run.draft)
    path, page = write_report(report | changes, run.path / "evaluation" / "test")
    made = (run.draft / "config.json").stat().st_mtime
    for file in (path, page):
        os.utime(file, (made + later, made + later))


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run for one test, its times kept."""
    shutil.copytree(made[0], tmp_path / "run")
    card = tmp_path / "run" / "export" / "vllm" / "README.md"
    os.utime(card, (card.stat().st_mtime + 60,) * 2)
    return tmp_path / "run"


@pytest.fixture
def hub(monkeypatch):
    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield hub


@pytest.fixture
def no_hub(monkeypatch):
    """Whoever talks to the hub, or looks whether it is there, fails the test."""

    def refuse(*_, **__):
        raise AssertionError("a dry run needs no network")

    monkeypatch.setattr(publishing, "unreachable", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", refuse)


def fails(result, *parts):
    status, out, err = result
    assert status == 1 and "Traceback" not in out + err and err.count("error:") == 1, err
    message = err[err.index("error:") :]
    assert not [part for part in parts if part not in message], message


def test_upload_is_the_export_its_card_and_its_report(cli, run, hub):
    status, out, err = cli("publish", run, "--to", REPO, "--json")
    assert status == 0, err
    facts, export = json.loads(out), run / "export" / "vllm"
    assert facts["url"] == f"{hub.url}/{REPO}" and facts["commit"] == "1" * 40 and facts["repo"] == REPO
    expected = {path.name: path.read_bytes() for path in export.iterdir()}
    for name in ("report.json", "report.html"):
        expected[name] = (run / "evaluation" / "test" / name).read_bytes()
    card = hub.files.pop("README.md").decode()
    old = expected.pop("README.md").decode()
    assert hub.files == expected and facts["files"].keys() == {*expected, "README.md"}
    assert facts["files"]["model.safetensors"] == (export / "model.safetensors").stat().st_size
    place = re.search(r'"model": "([^"]+)"', old)[1]
    assert place.endswith("export/vllm") and place not in card and f'"model": "{REPO}"' in card
    assert f"--speculative-draft-model-path {REPO} " in card
    assert card.replace(REPO, place) == old, "nothing but the folder's name is changed"
    assert hub.made == [{"name": "draft", "organization": "me"}]
    assert hub.tokens == {"Bearer hf_secret"}
    assert f"published at {hub.url}/{REPO}. Next: drafttrain check {REPO} --target" in err


def test_the_hub_reads_the_card(cli, run, no_hub):
    assert cli("publish", run, "--to", REPO, "--dry-run")[0] == 0
    data = ModelCard.load(run / "publish" / "vllm" / "README.md").data
    assert data.license == "apache-2.0" and data.base_model == "target" and data.library_name == "drafttrain"
    assert data.tags == ["speculative-decoding", "eagle3"]
    body = ModelCard.load(run / "publish" / "vllm" / "README.md").text
    assert cli("publish", run, "--to", REPO, "--dry-run", "--base-model", "some/target")[0] == 0
    card = ModelCard.load(run / "publish" / "vllm" / "README.md")
    assert card.data.to_dict() == data.to_dict() | {"base_model": "some/target"} and card.text == body
    fails(cli("publish", run, "--to", REPO, "--base-model", "target"), "--base-model is 'target'", "the owner too")


def test_dry_run_sends_nothing_and_shows_every_file(cli, run, no_hub):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, out, err = cli("publish", run, "--to", REPO, "--dry-run", "--private")
    assert status == 0, err
    place = run / "publish" / "vllm"
    for path in place.iterdir():
        assert re.search(rf"{path.name} .* (\d+ B|[\d.]+ MiB) ", out), path.name
    assert "6 files" in out and len(list(place.iterdir())) == 6
    assert f"Next: drafttrain publish {run} --to {REPO} --private" in " ".join(out.split())
    assert "base_model in" in out and "is target, no hub id" in out
    now = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and place not in path.parents}
    assert now == before
    assert (place / "model.safetensors").stat().st_nlink == 2, "weights take the disk once"


def test_private_repositories(cli, run, hub):
    fails(cli("publish", run, "--to", REPO, "--private"), "me/draft exists and is public", "another --to")
    assert hub.made == [{"name": "draft", "organization": "me", "visibility": "private"}]
    assert not hub.files and not [path for path in hub.calls if "commit" in path]
    hub.private = True
    assert cli("publish", run, "--to", REPO, "--private")[0] == 0 and hub.files


@pytest.mark.parametrize(
    ("beginning", "status", "mend"),
    [
        ("/api/repos/create", 401, "hf auth login"),
        ("/api/repos/create", 403, "allowed to write to me"),
        ("/api/models/me/draft/commit", 400, "try again"),
    ],
)
def test_what_the_hub_refuses(cli, run, hub, beginning, status, mend):
    hub.refusal, hub.exists = (beginning, status), status == 400
    fails(cli("publish", run, "--to", REPO), f"refused ({status}: ", mend, f"hf upload {REPO} {run}/publish/vllm")
    assert not hub.files


def test_without_network_or_token(cli, run, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fails(cli("publish", run, "--to", REPO), "HF_HUB_OFFLINE is set", f"hf upload {REPO} {run}/publish/vllm")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    fails(cli("publish", run, "--to", REPO), "no token", "hf auth login", f"hf upload {REPO} {run}/publish/vllm")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    fails(cli("publish", run, "--to", REPO), "http://127.0.0.1:9 cannot be reached", "Mend")
    assert not hub.calls


@pytest.mark.parametrize(
    "repo", ["draft", "me/dra ft", "a/b/c", "me/draft.git", "me/a..b", "-me/draft", "me/" + "a" * 97]
)
def test_names_that_no_repository_can_have(repo):
    with pytest.raises(PublishError, match=r"--to is .*Mend: --to OWNER/"):
        check_repo(repo)
    check_repo(REPO)


def test_a_draft_that_the_engine_would_serve_otherwise_is_refused(cli, run, no_hub):
    config = json.loads((run / "export" / "vllm" / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (run / "export" / "vllm" / "config.json").write_text(json.dumps(config))
    fails(cli("publish", run, "--to", REPO, "--dry-run"), "fails for vllm", "(mend: ", "drafttrain check")
    assert not (run / "publish").exists()


def test_engines_that_serve_no_such_draft(cli, run, no_hub):
    fails(cli("publish", run, "--to", REPO, "--dry-run", "--engine", "vlm"), "--engine is 'vlm'", "llama.cpp")
    message = f"Mend: drafttrain export {run} --engine sglang"
    fails(cli("publish", run, "--to", REPO, "--dry-run", "--engine", "sglang"), "is no export", message)
    shutil.copytree(run / "export" / "vllm", run / "export" / "transformers")
    result = cli("publish", run, "--to", REPO, "--dry-run", "--engine", "transformers")
    fails(result, "is not supported for transformers", "serves no such drafts")


def test_the_draft_as_it_is_now(cli, run, no_hub):
    """A run that went on since its export, or was measured since, is exported again first."""
    export = run / "export" / "vllm"
    written = (export / "README.md").stat().st_mtime
    report = run / "evaluation" / "test" / "report.json"
    os.utime(report, (written + 5,) * 2)
    message = f"Mend: drafttrain export {run} --engine vllm"
    fails(cli("publish", run, "--to", REPO, "--dry-run"), f"is older than {report}", message)
    fails(cli("publish", export, "--to", REPO, "--dry-run"), "is older than", message)
    os.utime(run / "draft" / "config.json", (written + 5,) * 2)
    fails(cli("publish", run, "--to", REPO, "--dry-run"), f"is older than {run / 'draft'}", message)


def test_an_export_by_itself(cli, run, made, tmp_path, no_hub):
    shutil.copytree(run / "export" / "vllm", tmp_path / "alone")
    found = Exported.find(tmp_path / "alone")
    assert (found.engine, found.run, found.reports) == ("vllm", None, [])
    assert found.target == str(made[1].folder)
    assert Exported.find(run / "export" / "vllm").run.path == run
    status, out, _ = cli("publish", tmp_path / "alone", "--to", REPO, "--dry-run")
    assert status == 0 and "there is no evaluation report of this draft" in out
    assert (tmp_path / "alone-publish" / "config.json").exists()
    fails(cli("publish", run / "draft", "--to", REPO), "is no export", "drafttrain export RUN --engine vllm")
    (tmp_path / "alone" / "drafttrain.json").unlink()
    fails(cli("publish", tmp_path / "alone", "--to", REPO), "which target", "--target NAME_OR_PATH")


def test_heads_of_a_tuned_target_name_it(run, made):
    """Medusa-2: the target is the one that was tuned with the heads, and has to be published too."""
    shutil.copytree(made[1].folder, run / "draft" / "target")
    facts = json.loads((run / "draft" / "drafttrain.json").read_text())
    facts["tuned_from"] = {"name": "the-base", "fingerprint": "0"}
    (run / "draft" / "drafttrain.json").write_text(json.dumps(facts))
    found = Exported.find(run)
    assert found.target == str(run / "draft" / "target") and found.tuned == run / "draft" / "target"
    notes = notes_of(found, build_folder(found, REPO, found.place))
    assert any(f"served with {found.tuned}, tuned from the-base, alone" in note for note in notes)


def test_a_folder_of_other_things_stays(cli, run, tmp_path, no_hub):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    result = cli("publish", run, "--to", REPO, "--dry-run", "--output", tmp_path / "mine")
    fails(result, "holds something else", "--output")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    for _ in range(2):  # A former folder is replaced.
        assert cli("publish", run, "--to", REPO, "--dry-run")[0] == 0


def test_keys_of_servers_stay_at_home(cli, run, made, no_hub):
    arguments = ["drafttrain", "evaluate", "x", "--api-key", "sk-1", "--k", "3"]
    assert command_line(arguments) == "drafttrain evaluate x --api-key HIDDEN --k 3"
    assert command_line(["x", "--api-key=sk-1"]) == "x --api-key=HIDDEN"
    provenance = {"versions": {}, "recipe": {}}
    report_of(RunFolder(run), made[1], provenance=provenance | {"command": " ".join(arguments)})
    fails(cli("publish", run, "--to", REPO, "--dry-run"), "holds the key of a server", "OPENAI_API_KEY")
    assert not (run / "publish").exists()
    report_of(RunFolder(run), made[1], provenance=provenance | {"command": command_line(arguments)})
    assert cli("publish", run, "--to", REPO, "--dry-run")[0] == 0


def test_serve_commands_of_every_engine_name_the_repository():
    card = """vllm serve t --speculative-config '{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 3}'
python -m sglang.launch_server --speculative-draft-model-path FOLDER --speculative-num-steps 3
python -c 'print(pipeline("text-generation", "t", assistant_model="FOLDER"))'
llama-server -m t.gguf -md FOLDER/draft.gguf --spec-type draft-simple
A model.
"""
    fetched = f"hf download {REPO} draft.gguf --local-dir .\nllama-server"
    for folder in ("checkpoints/demo/export/vllm", "model"):
        expected = card.replace("FOLDER/draft", "draft").replace("FOLDER", REPO).replace("llama-server", fetched)
        assert with_repo(card.replace("FOLDER", folder), REPO) == expected
