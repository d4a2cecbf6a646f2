"""Medusa exports: a second reader, written after vLLM's, drafts from the files what our proposer drafts in memory."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.export.base import ExportError
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.export.medusa import write_medusa, write_original
from drafttrain.export.serve import check_engine, serve_command
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.nn.tree import StaticTree
from drafttrain.target import Target
from tests.export.medusa_reader import Reader, config_of
from tests.tiny_drafts import make_target
from tests.tiny_medusa import make_heads
from tests.tiny_models import V, make_model, make_tokenizer, tokens

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H, ROWS = 32, 64
IDS = torch.tensor(sorted({0, 1, 2, *range(7, V, 2)}))
TREE = StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
VARIANTS = {
    "shared": {},
    "own": {"own_heads": True},
    "reduced": {"ids": IDS},
    "deep": {"num_hidden_layers": 2},
    "deep and reduced": {"num_hidden_layers": 2, "ids": IDS},
}


@pytest.fixture(scope="module")
def target():
    return make_target(tokenizer=make_tokenizer())


@pytest.fixture
def folder(target, tmp_path):
    """A run's draft folder: three heads over a smaller vocabulary, bf16 with fp32 masters."""
    save_draft(make_heads(target, IDS), target, tmp_path / "run" / "draft", BF16, validation={"length": 2.5})
    return tmp_path / "run" / "draft"


def content(folder) -> dict[str, bytes]:
    """The files but for the card, which each export has anew."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != "README.md"]
    return {path.name: path.read_bytes() for path in files}


def edit(path, **changes) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def seen(target) -> tuple:
    """A prefill of 64 prompts, and the states that an engine hands to its heads: transformers' last ones."""
    ids = tokens(ROWS, 9)
    step = target.step(ids, RaggedCache(ROWS), torch.full((ROWS,), 9))
    normed = target.model(ids, output_hidden_states=True).hidden_states[-1][:, -1]
    return step, normed.detach()


def ours(draft, target, step, k: int) -> torch.Tensor:
    """Our proposer's drafts [64, k] behind the same prompts."""
    proposer = draft.proposer(target)
    chosen = step.logits[:, -1].argmax(-1)
    proposer.begin(step, chosen, Sampling(), Streams(0, range(ROWS)))
    return proposer.propose(torch.full((ROWS,), k)).tokens


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Cohere2", "Granite"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_engine_drafts_what_we_draft(family, variant, tmp_path):
    """Whatever the target does to its logits keeps their order, so engines may leave it out."""
    target = make_target(family)
    draft = make_heads(target, **VARIANTS[variant])
    save_draft(draft, target, tmp_path / "draft", FP32)
    export_draft(tmp_path / "draft", target, tmp_path / "export")
    step, normed = seen(target)
    expected = ours(draft, target, step, 3)
    assert all(len(column.unique()) > 5 for column in expected.T)
    assert torch.equal(Reader(tmp_path / "export", 3).drafts(normed), expected)
    assert torch.equal(ours(load_draft(tmp_path / "export", target), target, step, 3), expected)


def test_the_reader_tells_apart(target, tmp_path):
    """The comparison above fails without biases, without scales, and for a shifted map or heads in another order."""
    draft = make_heads(target, IDS)
    save_draft(draft, target, tmp_path / "draft", FP32)
    step, normed = seen(target)
    expected = ours(draft, target, step, 3)

    def damaged(name, change=lambda tensors: None, **config):
        path = shutil.copytree(tmp_path / "draft", tmp_path / name, ignore=shutil.ignore_patterns("master"))
        edit(path / "config.json", **config)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return Reader(path, 3).drafts(normed)

    def swapped(tensors):
        first, second = (tensors[f"blocks.{i}.layers.0.bias"] for i in (0, 1))
        tensors |= {"blocks.0.layers.0.bias": second, "blocks.1.layers.0.bias": first}

    assert torch.equal(damaged("sound"), expected)
    assert not torch.equal(damaged("no biases", medusa_fc_bias=None), expected)
    assert not torch.equal(damaged("swapped biases", swapped), expected)
    scale = draft.input_rms
    assert not torch.equal(
        damaged("no scale", lambda t: t.update({n: x * scale for n, x in t.items() if n.endswith("0.weight")})),
        expected,
    )
    assert not torch.equal(damaged("shifted", lambda t: t.update(token_map=t["token_map"] - 1)), expected)


def test_tensors_and_config(target, folder):
    """FORMATS: names without a prefix, shapes, one dtype, and no more than that."""
    expected = {f"blocks.{i}.layers.0.weight": ((H, H), BF16) for i in range(3)}
    expected |= {f"blocks.{i}.layers.0.bias": ((H,), BF16) for i in range(3)}
    expected |= {"lm_head.weight": ((len(IDS), H), BF16), "token_map": ((len(IDS),), torch.int64)}
    stored = load_file(folder / "model.safetensors")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == expected
    assert torch.equal(stored["lm_head.weight"], target.model.lm_head.weight[IDS].bfloat16())
    assert torch.equal(stored["token_map"], IDS)
    assert config_of(folder) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "truncated_vocab_size": len(IDS),
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "sequential": False,
        "torch_dtype": "bfloat16",
    }


def test_own_heads_have_no_shared_one(target, tmp_path):
    write_medusa(make_heads(target, own_heads=True), target, tmp_path, BF16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name for name in stored if "lm_head" in name} == {f"lm_heads.{i}.weight" for i in range(3)}
    assert "token_map" not in stored and config_of(tmp_path)["original_lm_head"] is False


def test_provenance(target, folder, tmp_path):
    export_draft(folder, target, tmp_path / "two", k=2)
    for path in (folder, tmp_path / "two"):
        facts = json.loads((path / "drafttrain.json").read_text())
        assert facts["target_fingerprint"] == target.fingerprint and len(facts["tokenizer_sha256"]) == 64
        assert facts["method"] == "medusa" and facts["validation"] == {"length": 2.5}


# How many heads.


@pytest.mark.parametrize("variant", VARIANTS)
def test_fewer_heads_are_the_first_ones(target, variant, tmp_path):
    draft = make_heads(target, **VARIANTS[variant])
    save_draft(draft, target, tmp_path / "draft", BF16)
    assert export_draft(tmp_path / "draft", target, tmp_path / "all") == 3
    assert export_draft(tmp_path / "draft", target, tmp_path / "two", k=2) == 2
    assert content(tmp_path / "all") == content(tmp_path / "draft")
    whole, two = (load_file(tmp_path / name / "model.safetensors") for name in ("all", "two"))
    assert two.keys() == {name for name in whole if not name.startswith(("blocks.2.", "lm_heads.2."))}
    assert all(torch.equal(whole[name], tensor) for name, tensor in two.items())
    assert config_of(tmp_path / "two") == config_of(tmp_path / "all") | {"num_heads": 2}
    # vLLM, told to draft two, builds two heads whatever the file holds.
    _, normed = seen(target)
    found = [Reader(tmp_path / name, 2).drafts(normed.bfloat16()) for name in ("all", "two")]
    assert torch.equal(*found)


def test_more_heads_than_there_are(target, folder, tmp_path):
    for k in (4, 0):
        with pytest.raises(ExportError, match=rf"--k is {k} and the draft has 3 heads.*Mend"):
            export_draft(folder, target, tmp_path / "export", k=k)
    assert not (tmp_path / "export").exists()
    with pytest.raises(KeyError, match=r"blocks\.3\.layers\.0\.weight"):
        Reader(folder, 4)


def with_tree(target, ids=None, **choices) -> MedusaDraft:
    draft = make_heads(target, ids, **choices)
    draft.tree, draft.tree_facts = TREE, {"tau": 2.5}
    return draft


def test_the_tree_travels(target, tmp_path):
    save_draft(with_tree(target), target, tmp_path / "draft", BF16)
    for name, options in {"same": {}, "half": {"dtype": FP16}, "old": {"engine": "tensorrt-llm"}}.items():
        export_draft(tmp_path / "draft", target, tmp_path / name, **options)
        facts = json.loads((tmp_path / name / "medusa_tree.json").read_text())
        assert facts == {"paths": TREE.paths(), "tau": 2.5}
    # Of two heads the two upper levels are left, and what was measured of the whole tree is not.
    for name, engine in (("two", "vllm"), ("old two", "tensorrt-llm")):
        export_draft(tmp_path / "draft", target, tmp_path / name, k=2, engine=engine)
        facts = json.loads((tmp_path / name / "medusa_tree.json").read_text())
        assert facts == {"paths": [[0], [1], [0, 0], [0, 1], [1, 0]]}
    assert load_draft(tmp_path / "two", target).tree.depth == 2


# What is refused.


def test_biases_removed(target, folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    save_file({n: x for n, x in tensors.items() if not n.endswith("bias")}, folder / "model.safetensors")
    with pytest.raises(DraftError, match=r"blocks\.0\.layers\.0\.bias.*with biases"):
        export_draft(folder, target, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("value", [False, None])
def test_a_config_without_biases(target, folder, value, tmp_path):
    edit(folder / "config.json", medusa_fc_bias=value)
    with pytest.raises(DraftError, match=r"medusa_fc_bias is .*Expected true"):
        export_draft(folder, target, tmp_path / "export", k=2)
    assert not (tmp_path / "export").exists()


def test_sequential_heads_are_kept_but_not_served(target, tmp_path):
    draft = make_heads(target, sequential=True)
    save_draft(draft, target, tmp_path / "draft", FP32)
    step, _ = seen(target)
    assert torch.equal(ours(load_draft(tmp_path / "draft", target), target, step, 3), ours(draft, target, step, 3))
    assert config_of(tmp_path / "draft")["architectures"] == ["SequentialMedusaModel"]
    for engine in ("vllm", "tensorrt-llm"):
        with pytest.raises(ExportError, match=r"sequential heads.*no engine serves.*Mend"):
            check_engine(engine, "medusa", tmp_path / "draft")
    with pytest.raises(ExportError, match="expected one of vllm, tensorrt-llm for method medusa"):
        check_engine("sglang", "medusa", tmp_path / "draft")


def test_a_target_whose_head_has_a_bias(tmp_path):
    model = make_model("Llama", max_position_embeddings=256)
    model.lm_head.bias = nn.Parameter(torch.linspace(-3, 3, V))
    target = Target.from_model(model, name="biased")
    draft = make_heads(target)
    save_draft(draft, target, tmp_path / "draft", FP32)
    step, normed = seen(target)
    assert torch.equal(ours(load_draft(tmp_path / "draft", target), target, step, 3), ours(draft, target, step, 3))
    assert not torch.equal(Reader(tmp_path / "draft", 3).drafts(normed), ours(draft, target, step, 3))
    with pytest.raises(ExportError, match=r"head of biased has a bias, which engines leave out.*Mend"):
        export_draft(tmp_path / "draft", target, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), BF16), (1e5, FP16)])
@pytest.mark.parametrize("write", [write_medusa, write_original])
def test_numbers_that_do_not_survive(target, value, dtype, write, tmp_path):
    draft = make_heads(target)
    with torch.no_grad():
        draft.blocks[1].layers[0].bias[3] = value
    with pytest.raises(ExportError, match=r"1\.(layers\.0|0\.linear)\.bias hold.*not finite.*Mend"):
        write(draft, target, tmp_path, dtype)
    assert not list(tmp_path.iterdir())


# From which numbers.


def test_another_dtype_comes_from_the_masters(target, folder, tmp_path):
    export_draft(folder, target, tmp_path / "half", FP16)
    masters, stored = (load_file(path / "model.safetensors") for path in (folder / "master", tmp_path / "half"))
    weight = masters["blocks.1.layers.0.weight"] / masters["input_rms"]
    assert torch.equal(stored["blocks.1.layers.0.weight"], weight.half())
    assert config_of(tmp_path / "half")["torch_dtype"] == "float16"
    shutil.rmtree(folder / "master")
    for options in ({}, {"k": 2}, {"engine": "tensorrt-llm"}):
        with pytest.raises(ExportError, match=r"bfloat16 weights and no fp32 masters, torch.float16 was asked for"):
            export_draft(folder, target, tmp_path / "again", FP16, **options)
    assert not (tmp_path / "again").exists()


def test_without_masters_heads_leave_as_they_are_stored(target, folder, tmp_path):
    whole = load_file(folder / "model.safetensors")
    shutil.rmtree(folder / "master")
    export_draft(folder, target, tmp_path / "two", k=2)
    two = load_file(tmp_path / "two" / "model.safetensors")
    assert len(two) == 6 and all(torch.equal(whole[name], tensor) for name, tensor in two.items())


def test_what_an_engine_would_misread_is_written_anew(target, folder, tmp_path):
    """Masters by themselves, whose scales and vocabulary vLLM passes over, and a file without the shared matrix."""
    export_draft(folder / "master", target, tmp_path / "masters")
    write_medusa(make_heads(target, IDS), target, folder / "master", FP32)
    assert (tmp_path / "masters" / "model.safetensors").read_bytes() == content(folder / "master")["model.safetensors"]
    before = content(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    export_draft(folder, target, tmp_path / "headless")
    assert content(tmp_path / "headless") == before


# The first release's layout.


@pytest.mark.parametrize("variant", ["shared", "own", "deep"])
@pytest.mark.parametrize("k", [None, 2])
def test_the_original_layout_holds_the_same(target, variant, k, tmp_path):
    draft = make_heads(target, **VARIANTS[variant])
    save_draft(draft, target, tmp_path / "draft", FP32)
    export_draft(tmp_path / "draft", target, tmp_path / "old", k=k, engine="tensorrt-llm")
    export_draft(tmp_path / "draft", target, tmp_path / "new", k=k)
    count = k or 3
    assert set(content(tmp_path / "old")) == {"config.json", "medusa_lm_head.safetensors", "drafttrain.json"}
    old, new = Reader(tmp_path / "old", count), Reader(tmp_path / "new", count)
    blocks = {name for name in new.tensors if name.startswith("blocks")}
    assert blocks == {name for name in old.tensors if name.startswith("blocks")}
    assert all(torch.equal(old.tensors[name], new.tensors[name]) for name in blocks)
    for i in range(count):
        head = new.tensors["lm_head.weight" if new.shared else f"lm_heads.{i}.weight"]
        assert torch.equal(old.tensors[f"lm_heads.{i}.weight"], head)
    step, normed = seen(target)
    assert torch.equal(old.drafts(normed), ours(draft, target, step, count))
    config = config_of(tmp_path / "old")
    layers = 2 if variant == "deep" else 1
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (count, layers)
    assert config["base_model_name_or_path"] == "tiny Llama" and config["medusa_fc_bias"] is True
    layout = load_file(tmp_path / "old" / "medusa_lm_head.safetensors")
    expected = {f"{i}.{j}.linear.{leaf}" for i in range(count) for j in range(layers) for leaf in ("weight", "bias")}
    assert layout.keys() == expected | {f"{i}.{layers}.weight" for i in range(count)}


@pytest.mark.parametrize(
    ("choices", "message"),
    [({"ids": IDS}, f"a draft vocabulary of {len(IDS)} words"), ({"sequential": True}, "sequential heads")],
)
def test_what_the_original_layout_cannot_hold(target, choices, message, tmp_path):
    save_draft(make_heads(target, **choices), target, tmp_path / "draft", FP32)
    with pytest.raises(ExportError, match=f"the draft has {message}.*Mend"):
        export_draft(tmp_path / "draft", target, tmp_path / "export", engine="tensorrt-llm")
    assert not (tmp_path / "export").exists()


def test_one_engines_export_replaces_anothers(target, tmp_path):
    save_draft(with_tree(target), target, tmp_path / "draft", FP32)
    for engine, file in (("tensorrt-llm", "medusa_lm_head"), ("vllm", "model"), ("tensorrt-llm", "medusa_lm_head")):
        export_draft(tmp_path / "draft", target, tmp_path / "export", engine=engine)
        assert [path.stem for path in (tmp_path / "export").glob("*.safetensors")] == [file]


def test_commands(target, folder, tmp_path):
    (tmp_path / "whole").mkdir()
    write_medusa(make_heads(target), target, tmp_path / "whole", BF16)
    three = serve_command("vllm", target, tmp_path / "whole", 3, "medusa")
    spec = f'{{"method": "medusa", "model": "{tmp_path / "whole"}", "num_speculative_tokens": 3}}'
    assert three == f"vllm serve tiny Llama --speculative-config '{spec}'"
    assert "--model-impl" not in serve_command("vllm", make_target("Gemma3"), tmp_path / "whole", 3, "medusa")
    # vLLM 0.32 takes the word list for a weight that was not loaded.
    flag = """ --model-loader-extra-config '{"enable_weights_track": false}' """
    assert flag in serve_command("vllm", target, folder, 3, "medusa") and flag not in three
    assert serve_command("tensorrt-llm", target, folder, 3, "medusa") is None
