"""`drafttrain init`: what it writes for published configs, by hand, and everything that it refuses, in one line."""

import json
from pathlib import Path

import pytest
import yaml

from drafttrain.evaluate.roofline import DEVICES
from drafttrain.init import InitError, default_path, make_recipe, placed, read_facts, write_recipe
from drafttrain.init_families import SIBLINGS, engine_words
from drafttrain.init_memory import largest_batch
from drafttrain.init_numbers import GIB, draft_shape, feature_layers, gpus, power_below
from drafttrain.plan_cost import plan_cost
from drafttrain.recipe import load_recipe, parse_recipe
from tests.family_shapes import PUBLISHED, tiny_config
from tests.test_target_files import write_tiny_gguf
from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[1] / "recipes"
FILES = [path for path in sorted(ROOT.rglob("*.yaml")) if path.parent.name != "accelerate"]
MEASURED = {f"{method}-gemma3-270m.yaml" for method in ("eagle3", "medusa", "kd")}
LLAMA, QWEN, OSS = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
DEEPSEEK, SCOUT = "deepseek-ai/DeepSeek-V3-0324", "meta-llama/Llama-4-Scout-17B-16E-Instruct"
ROWS = '{"prompt": "a"}\n'


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Facts of a published target, from its config alone."""
    known = {}

    def of(name: str):
        if name not in known:
            path = tmp_path_factory.mktemp("config") / "config.json"
            path.write_text(json.dumps(PUBLISHED[name]))
            known[name] = read_facts(str(path), name)
        return known[name]

    return of


def refused(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert status == 1 and "Traceback" not in out + err and err.count("error:") == 1, err
    assert len(err.strip().splitlines()) == 1 and not [part for part in parts if part not in err], err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_recipes_are_what_init_writes(path, facts, tmp_path):
    """Of Gemma 3 270M, whose recipes were measured, the settings; of all others every character."""
    recipe = load_recipe(path)
    text = make_recipe(facts(recipe.target.name_or_path), recipe.method)
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120
    if path.name not in MEASURED:
        assert text == path.read_text(encoding="utf-8")
        return
    written = write_recipe(text, tmp_path / "recipe.yaml")
    ours, theirs = recipe.model_dump(), written.model_dump()
    ours["draft"]["intermediate_size"] = ours["features"]["layers"] = None
    theirs["draft"]["intermediate_size"] = theirs["features"]["layers"] = None
    assert ours == theirs


def test_parameters_are_those_of_the_published_models(facts):
    """Billions, as the models' cards give them."""
    cards = {LLAMA: 8.03, "microsoft/phi-4": 14.66, "google/gemma-3-270m-it": 0.268, "Qwen/Qwen3-0.6B": 0.596}
    for name, billions in {**cards, QWEN: 30.53, OSS: 116.83, DEEPSEEK: 671.03}.items():
        assert facts(name).parameters == pytest.approx(billions * 1e9, rel=2e-3), name
    for name, billions in {OSS: 5.7, DEEPSEEK: 37.6, QWEN: 3.35}.items():  # Embeddings counted in.
        assert facts(name).active == pytest.approx(billions * 1e9, rel=0.02), name
    for sibling in SIBLINGS:
        laid_out = sibling.student().outline
        assert laid_out.parameters == sibling.parameters and not laid_out.head
        if sibling.name in PUBLISHED:
            given = facts(sibling.name)
            assert given.parameters == sibling.parameters
            assert (given.heads, given.kv_heads, given.head_dim) == sibling.heads


def test_numbers_by_hand(facts, tmp_path):
    assert feature_layers(32) == [2, 16, 29] and feature_layers(6) == [1, 3, 5] and feature_layers(4) == [1, 2, 3]
    assert [power_below(number, 16) for number in (0.3, 1, 3.9, 4, 99)] == [1, 1, 2, 4, 16]
    own = draft_shape(facts(LLAMA))
    assert (own.heads, own.kv_heads, own.head_dim, own.inner, own.why_heads, own.why_inner) == (
        *(32, 8, 128, 14336),
        *(None, None),
    )
    latent = draft_shape(facts(DEEPSEEK))
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.inner) == (56, 8, 128, 18432)
    assert "latent" in latent.why_heads and latent.why_inner is None
    assert draft_shape(facts(OSS)).inner == 4 * 2880 and draft_shape(facts(QWEN)).inner == 8 * 768
    assert draft_shape(facts(SCOUT)).inner == 16384
    small = draft_shape(facts("google/gemma-3-270m-it"))
    assert (small.heads, small.kv_heads, small.head_dim, small.inner) == (10, 10, 64, 2048)
    assert gpus(facts(LLAMA), 80) == 1 and gpus(facts("meta-llama/Llama-3.3-70B-Instruct"), 80) == 3
    assert facts(LLAMA).cache_bytes == 32 * 2 * 8 * 128 * 2 and facts(DEEPSEEK).cache_bytes == 61 * (512 + 64) * 2


def test_the_batch_follows_from_memory(facts):
    recipe = parse_recipe(yaml.safe_load(make_recipe(facts(LLAMA), "eagle3")))
    tokens = [largest_batch(facts(LLAMA), recipe, memory).tokens for memory in (24, 40, 48, 80, 141)]
    assert tokens == sorted(tokens) and tokens[0] == 4096 and tokens[-1] == 16384
    found = largest_batch(facts(LLAMA), recipe, 80)
    assert found.target == pytest.approx(2 * facts(LLAMA).parameters / GIB)
    # fc, attention over [embedding ; hidden], MLP, head and norms: an fp32 master and two moments; copies of the
    # target's rows in bf16, and the words' numbers.
    trained = 3 * 4096**2 + 2 * 4096 * 6144 + 4096**2 + 3 * 4096 * 14336 + 32000 * 4096 + 4 * 4096
    copies = 2 * 32000 * 4096 + 4 * 3 * 4096 + 8 * 32000 + 9 * 128256
    assert found.draft == pytest.approx((12 * trained + copies) / GIB) and found.total < 0.9 * 80
    assert "2 GPUs of 24 GiB" in make_recipe(facts(LLAMA), "eagle3", memory=24)
    assert "too much" in make_recipe(facts(LLAMA), "eagle3", memory=8)


@pytest.mark.parametrize("name", [LLAMA, "Qwen/Qwen3-8B", "google/gemma-3-4b-it", "meta-llama/Llama-3.3-70B-Instruct"])
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_init_counts_memory_as_plan_does(name, method, tmp_path):
    """And over as many GPUs: the recipe of a target that one does not hold spreads it (device_map)."""
    config = {**PUBLISHED[name], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    room = DEVICES["H100"].memory / GIB
    text = make_recipe(read_facts(str(tmp_path)), method, memory=room)
    memory = plan_cost(write_recipe(text, tmp_path / "r.yaml"), device="H100", tokens=1000)["memory"]
    assert f"about {memory['alone']['peak'] / GIB:.0f} of {room:g} GiB" in text
    spread = {"eagle3": 5, "medusa": 3}[method] if "70B" in name else 1
    assert memory["spread"] == spread and (f"{spread} GPUs of" in text) == (spread > 1)


def test_a_template_at_hand_decides_chat_and_thinking(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3").to_dict(), default=str))
    assert "enable_thinking: true" in make_recipe(read_facts(str(tmp_path)), "eagle3")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    text = make_recipe(read_facts(str(tmp_path)), "eagle3")
    assert "enable_thinking" not in text and "chat: template" in text
    (tmp_path / "chat_template.jinja").write_text("{% if enable_thinking %}{% endif %}")
    recipe = write_recipe(make_recipe(read_facts(str(tmp_path)), "eagle3"), tmp_path / "r.yaml")
    assert recipe.data.chat_template_kwargs == {"enable_thinking": True}
    assert recipe.target.name_or_path == str(tmp_path)


def test_engines_are_named_as_the_exporter_knows_them(facts):
    (gemma,) = engine_words(facts("google/gemma-3-27b-it"), "eagle3")
    assert "--model-impl transformers" in gemma and "; SGLang;" in gemma and "not llama.cpp" in gemma
    (phi,) = engine_words(facts("microsoft/phi-4"), "eagle3")
    assert "Engines: vLLM; SGLang; llama.cpp unconfirmed" in phi
    assert "SGLang, llama.cpp and transformers serve no Medusa heads" in " ".join(engine_words(facts(LLAMA), "medusa"))


def test_init_on_the_command_line(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_config("llama").to_dict(), default=str))
    (tmp_path / "chats.jsonl").write_text(ROWS)
    status, out, err = cli("init", "--target", "model", "--data", "chats.jsonl", "--output", "in/r.yaml", "--json")
    assert status == 0, err
    found = json.loads(out)
    recipe = load_recipe(tmp_path / "in" / "r.yaml")
    assert found["settings"] == recipe.model_dump(mode="json") and "drafttrain prepare in/r.yaml" in err
    assert recipe.data.train[0].path == str(tmp_path / "chats.jsonl") and not recipe.data.validation
    assert recipe.target.name_or_path == str(tmp_path / "model")
    assert cli("init", "--target", "model", "--method", "medusa")[0] == 0 and Path("medusa-model.yaml").exists()
    status, out, err = cli("init", "--target", "model/config.json", "--name", "me/it", "--method", "kd")
    assert status == 0 and load_recipe("kd-it.yaml").target.name_or_path == "me/it", err
    refused(cli("init", "--target", "model", "--method", "medusa"), "medusa-model.yaml exists", "--overwrite")
    assert cli("init", "--target", "model", "--method", "medusa", "--overwrite")[0] == 0


def test_what_init_refuses_in_one_line(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = tiny_config("deepseek_v3").to_dict()
    Path("config.json").write_text(json.dumps(config, default=str))
    Path("broken.json").write_text("{")
    Path("file.gguf").write_bytes(b"nothing")
    refused(cli("init", "--target", "nobody/nothing"), "nobody/nothing", "HF_HUB_OFFLINE is set")
    refused(cli("init", "--target", "./nowhere"), "nowhere", "no such folder")
    refused(cli("init", "--target", "broken.json"), "broken.json")
    refused(cli("init", "--target", "none.gguf"), "No GGUF file at none.gguf")
    refused(cli("init", "--target", "file.gguf"), "file.gguf")
    refused(cli("init", "--target", "config.json", "--method", "eagle2"), "--method is 'eagle2'", "eagle3, medusa, kd")
    refused(cli("init", "--target", "config.json", "--memory", "0"), "--memory is 0")
    refused(cli("init", "--target", "config.json", "--data", "no.jsonl"), "No file at no.jsonl")
    refused(cli("init", "--target", "config.json", "--sibling", "a/b"), "--sibling is 'a/b'", "--method kd")
    refused(cli("init", "--target", "config.json", "--method", "kd"), "of several makes", "--sibling ID")
    Path("config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}, default=str))
    refused(cli("init", "--target", "config.json"), "features.layers", "3 layers")
    Path("config.json").write_text(json.dumps(tiny_config("phi3").to_dict() | {"hidden_size": None}, default=str))
    refused(cli("init", "--target", "config.json"), "hidden_size")
    assert not list(tmp_path.glob("*.yaml"))


def test_a_sibling_of_ones_own(tmp_path):
    for name, words in (("big", 272), ("small", 200), ("other", 4000)):
        (tmp_path / name).mkdir()
        values = tiny_config("deepseek_v3" if name == "big" else "llama", vocab_size=words).to_dict()
        (tmp_path / name / "config.json").write_text(json.dumps(values, default=str))
    big = read_facts(str(tmp_path / "big"))
    text = make_recipe(big, "kd", sibling=str(tmp_path / "small"))
    assert write_recipe(text, tmp_path / "r.yaml").draft.init_from == str(tmp_path / "small")
    with pytest.raises(InitError, match="4,000 words, the target 272"):
        make_recipe(big, "kd", sibling=str(tmp_path / "other"))


def test_rotary_positions_that_no_draft_has(tmp_path):
    path = tmp_path / "config.json"
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    rope["original_max_position_embeddings"] = 128
    path.write_text(json.dumps(tiny_config("phi3").to_dict() | {"rope_parameters": rope}, default=str))
    facts = read_facts(str(path))
    with pytest.raises(InitError, match="scaled by 'longrope'.*--method medusa or kd"):
        make_recipe(facts, "eagle3")
    assert "method: medusa" in make_recipe(facts, "medusa")


def test_a_gguf_files_config_is_enough(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", make_model("Qwen2"))
    facts = read_facts(str(tmp_path / "tiny.gguf"))
    assert (facts.kind, facts.layers, facts.width) == ("qwen2", 8, 32)
    assert default_path(facts, "eagle3") == Path("eagle3-tiny.yaml")
    recipe = write_recipe(make_recipe(facts, "eagle3"), tmp_path / "r.yaml")
    assert recipe.target.name_or_path == str(tmp_path / "tiny.gguf") and recipe.features.layers == [2, 4, 5]


def test_odd_names_are_quoted(tmp_path):
    (tmp_path / "my: model #1").mkdir()
    folder = tmp_path / "my: model #1"
    (folder / "config.json").write_text(json.dumps(tiny_config("llama").to_dict(), default=str))
    (folder / "a b.jsonl").write_text(ROWS)
    files = placed([str(folder / "a b.jsonl")], tmp_path)
    recipe = write_recipe(make_recipe(read_facts(str(folder)), "eagle3", (files, (), ())), tmp_path / "r.yaml")
    assert recipe.target.name_or_path == str(folder) and recipe.data.train[0].path == str(folder / "a b.jsonl")
    assert parse_recipe(recipe.model_dump()).method == "eagle3"
