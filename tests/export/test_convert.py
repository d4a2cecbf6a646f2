"""`drafttrain convert`: round trips are bit for bit; every form loads, drafts the same and says the same settings."""

import json

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.loading import load_draft
from drafttrain.export.base import ExportError
from drafttrain.export.convert import convert_draft
from drafttrain.nn.sampling import Sampling
from drafttrain.specdec.decode import generate
from tests.drafts.test_eagle3 import LLAMA3
from tests.export.checked_drafts import (
    checked,
    codes,
    copy,
    edit,
    edit_tensors,
    good_eagle3,
    good_medusa,
    good_original,
    good_small,
    read_target,
    settings,
    target_folder,
)
from tests.tiny_models import tokens

CHOICES = {
    "plain": {},
    "whole vocabulary": {"ids": None},
    "other layers": {"layers": [1, 4, 6, 8]},
    "eagle-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "own width, two layers, window": {"hidden_size": 48, "num_hidden_layers": 2, "sliding_window": 5},
}
PROMPTS = [tokens(1, 6)[0].tolist(), tokens(1, 11)[0].tolist()]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("target"), rope_parameters=LLAMA3, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def loaded(target):
    return read_target(target)


def along(source, target, folder, *forms):
    """The folders of conversions one after the other."""
    out = []
    for i, form in enumerate(forms):
        convert_draft(str(source), form, folder / f"{i}-{form}", str(target))
        source = folder / f"{i}-{form}"
        out.append(source)
    return out


def drafted(folder, target):
    draft = load_draft(folder, target)
    done = generate(target, PROMPTS, draft.proposer(target), k=3, sampling=Sampling(), max_new_tokens=12, stop_ids=())
    return [g.tokens for g in done.generations], done.counts


@pytest.mark.parametrize("name", CHOICES)
def test_round_trip_of_eagle3_is_bit_for_bit(name, target, loaded, tmp_path):
    """ours -> speculators -> legacy -> ours, and the other way round: the very files."""
    good = good_eagle3(loaded, tmp_path / "draft", **CHOICES[name])
    draft = load_draft(good, loaded)
    for forms in (("speculators", "legacy", "ours"), ("legacy", "speculators", "ours")):
        folders = along(good, target, tmp_path / forms[0], *forms)
        for file in ("config.json", "model.safetensors", "drafttrain.json"):
            assert (folders[-1] / file).read_bytes() == (good / file).read_bytes()
        for folder in folders:
            found = load_draft(folder, loaded)
            assert found.shape == draft.shape and found.state_dict().keys() == draft.state_dict().keys()
            assert all(torch.equal(x, draft.state_dict()[name]) for name, x in found.state_dict().items())


def test_every_form_drafts_the_same(target, loaded, tmp_path):
    good = good_eagle3(loaded, tmp_path / "draft", layers=[1, 4, 6])
    folders = along(good, target, tmp_path / "out", "speculators", "legacy")
    expected = drafted(good, loaded)
    assert expected[1].drafted > 0 and all(drafted(folder, loaded) == expected for folder in folders)


@pytest.mark.parametrize("name", CHOICES)
def test_no_form_has_a_fault_that_the_draft_has_not(name, target, loaded, tmp_path):
    good = good_eagle3(loaded, tmp_path / "draft", **CHOICES[name])
    before = codes(checked(good, target))
    for form in ("speculators", "legacy"):
        (folder,) = along(good, target, tmp_path / form, form)
        after = codes(checked(folder, target))
        for engine, named in after.items():
            fresh = named - before.get(engine, set())
            assert fresh <= ({"architectures"} if (form, engine) == ("legacy", "sglang") else set()), (form, engine)


def test_the_forms(target, loaded, tmp_path):
    """FORMATS: speculators nest the layer's settings and call it layers.0; SafeAILab pickle the engines' names."""
    good = good_eagle3(loaded, tmp_path / "draft")
    nested, old = along(good, target, tmp_path / "out", "speculators", "legacy")
    ours, config = settings(good), settings(nested)
    assert "model_type" not in config and config["speculators_model_type"] == "eagle3"
    inner = config["transformer_layer_config"]
    assert inner["model_type"] == "llama" and inner["rope_scaling"] == ours["rope_scaling"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["norm_before_residual"] is False
    shared = (inner.keys() | config.keys()) & ours.keys() - {"architectures"}
    assert len(shared) > 20 and all((inner | config)[key] == ours[key] for key in shared)
    said = config["speculators_config"]
    assert said["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert said["verifier"] == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    stored = load_file(good / "model.safetensors")
    other = load_file(nested / "model.safetensors")
    assert {name.replace("layers.0.", "midlayer.") for name in other} == set(stored)
    pickled = torch.load(old / "pytorch_model.bin", weights_only=True)
    assert pickled.keys() == stored.keys() and all(torch.equal(pickled[n], x) for n, x in stored.items())
    assert settings(old) == ours | {"architectures": ["LlamaForCausalLM"]} and not (old / "model.safetensors").exists()


def test_four_features_in_speculators_form(target, loaded, tmp_path):
    """vLLM takes their number from the nested settings."""
    good = good_eagle3(loaded, tmp_path / "draft", layers=[1, 4, 6, 8])
    (folder,) = along(good, target, tmp_path / "out", "speculators")
    assert settings(folder)["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert "vllm" not in codes(checked(folder, target))


def test_a_draft_that_says_no_layers_gets_the_defaults(target, loaded, tmp_path):
    good = good_eagle3(loaded, tmp_path / "draft")
    edit(good, eagle_aux_hidden_state_layer_ids=..., eagle_config=..., architectures=["LlamaForCausalLM"])
    (folder,) = along(good, target, tmp_path / "out", "ours")
    assert settings(folder)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert checked(folder, target).exit_status == 0


def test_a_form_that_its_own_trainer_would_misread_is_said(target, loaded, tmp_path):
    good = good_eagle3(loaded, tmp_path / "draft", layers=[1, 4, 6])
    told = convert_draft(str(good), "legacy", tmp_path / "old", str(target))
    assert told["notes"] == [
        "SafeAILab's own code captures [2, 4, 5] whatever the config says; this draft reads [1, 4, 6]"
    ]
    assert convert_draft(str(good), "speculators", tmp_path / "new", str(target))["notes"] == []


@pytest.mark.parametrize("variant", [{}, {"own_heads": True}, {"num_hidden_layers": 2}], ids=["shared", "own", "deep"])
def test_round_trip_of_medusa_is_bit_for_bit(variant, target, loaded, tmp_path):
    good = good_medusa(loaded, tmp_path / "draft", None, **variant)
    old, new = along(good, target, tmp_path / "out", "legacy", "ours")
    assert [path.name for path in old.glob("*.safetensors")] == ["medusa_lm_head.safetensors"]
    for file in ("config.json", "model.safetensors"):
        assert (new / file).read_bytes() == (good / file).read_bytes()
    assert checked(old, target).exit_status == checked(new, target).exit_status == 0
    assert drafted(new, loaded) == drafted(good, loaded)


def test_medusas_first_form_is_the_export_of_it(target, loaded, tmp_path):
    exported = good_original(loaded, tmp_path / "export")
    (old,) = along(tmp_path / "export-source", target, tmp_path / "out", "legacy")
    first, second = (load_file(path / "medusa_lm_head.safetensors") for path in (exported, old))
    assert first.keys() == second.keys() and all(torch.equal(first[name], x) for name, x in second.items())
    assert settings(exported) == settings(old)


# What is refused.


def test_what_a_form_cannot_hold(target, loaded, tmp_path):
    cases = [
        (good_medusa(loaded, tmp_path / "reduced"), "legacy", "smaller draft vocabulary"),
        (
            good_medusa(loaded, tmp_path / "heads", None),
            "speculators",
            "for a draft of method medusa. Expected ours or",
        ),
        (good_small(loaded, tmp_path / "small"), "ours", "small drafts have one layout"),
        (good_eagle3(loaded, tmp_path / "eagle"), "gguf", "--to is 'gguf'"),
    ]
    for folder, form, message in cases:
        with pytest.raises(ExportError, match=message):
            convert_draft(str(folder), form, tmp_path / "out", str(target))
    assert not (tmp_path / "out").exists()


def test_another_target_and_masters(target, loaded, tmp_path):
    good = good_eagle3(loaded, tmp_path / "draft")
    other = target_folder(tmp_path / "other", vocab_size=103)
    with pytest.raises(ExportError, match=r"has vocabulary 99.*other has 103.*Mend: --target"):
        convert_draft(str(good), "ours", tmp_path / "out", str(other))
    with pytest.raises(ExportError, match="holds masters.*drafttrain export"):
        convert_draft(str(good / "master"), "ours", tmp_path / "out", str(target))
    edit_tensors(copy(good, tmp_path / "broken"), lambda t: t.update(d2t=t["d2t"].flip(0)))
    with pytest.raises(DraftError, match="no vocabulary map"):
        convert_draft(str(tmp_path / "broken"), "ours", tmp_path / "out", str(target))
    assert not (tmp_path / "out").exists()


def test_other_folders_are_left_alone(target, loaded, tmp_path):
    good = good_eagle3(loaded, tmp_path / "draft")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for output, message in ((tmp_path / "out", "holds notes.txt"), (good, "holds master"), (tmp_path, "holds draft")):
        with pytest.raises(ExportError, match=message):
            convert_draft(str(good), "ours", output, str(target))
    (tmp_path / "out" / "notes.txt").unlink()
    along_twice = [convert_draft(str(good), form, tmp_path / "out", str(target)) for form in ("legacy", "ours")]
    assert len(along_twice) == 2 and not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_the_verb(cli, target, loaded, tmp_path):
    good = good_eagle3(loaded, tmp_path / "draft")
    out_folder = tmp_path / "out"
    code, out, err = cli("convert", good, "--to", "speculators", "--output", out_folder, "--target", target, "--k", 5)
    assert code == 0 and f"Next: drafttrain check {out_folder} --target {target}" in out, err
    assert settings(out_folder)["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    code, out, err = cli(
        "convert", out_folder, "--to", "ours", "--output", tmp_path / "b", "--target", target, "--json"
    )
    assert code == 0 and json.loads(out)["form"] == "ours"
    code, out, err = cli("convert", good, "--to", "tgi", "--output", tmp_path / "c", "--target", target)
    assert code == 1 and "--to is 'tgi'" in err
