"""Architectures as targets: each that recipes/README.md calls supported equals its own plain forward behind our hooks,
head and ragged cache, in chunks and in trees; the others are refused in words.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.errors import UserError
from drafttrain.init import InitError, make_recipe, read_facts
from drafttrain.init_numbers import check_rotary, draft_shape
from drafttrain.nn.cache import RaggedCache, visible, visible_tree
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target, TargetError, load_target
from drafttrain.target_support import unsupported
from tests.family_shapes import WRAPPERS, tiny_config, tiny_model
from tests.tiny_models import make_tokenizer, save

TABLE = Path(__file__).resolve().parents[1] / "recipes" / "README.md"
ROW = re.compile(r"^\| `([\w-]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)
ROWS = {kind: (methods, why.strip()) for kind, *methods, why in ROW.findall(TABLE.read_text(encoding="utf-8"))}
VERDICTS = {
    kind: dict(zip(("eagle3", "medusa", "kd"), map(str.strip, row[0]), strict=True)) for kind, row in ROWS.items()
}
WORKS = sorted(kind for kind, row in VERDICTS.items() if "yes" in row.values())
REFUSED = sorted(set(VERDICTS) - set(WORKS))


def write_config(folder: Path, config) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.to_dict().items() if key != "dtype"}, default=str))
    return path


def test_the_table_has_the_named_families_and_more():
    named = {"llama", "llama4", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gemma3", "mistral", "mistral3", "phi3"}
    assert {*named, "gpt_oss", "deepseek_v3"} <= set(WORKS)
    assert len(VERDICTS) >= 12 + 15 and len(REFUSED) >= 15
    assert {verdict for row in VERDICTS.values() for verdict in row.values()} == {"yes", "no"}


@pytest.mark.parametrize("family", WORKS)
def test_a_family_equals_its_own_forward(family):
    model = tiny_model(family, std=0.2)
    target, generator = Target.from_model(model), torch.Generator().manual_seed(3)
    n = target.num_layers
    texts = torch.randint(9, 270, (2, 14), generator=generator)
    own = model(input_ids=texts, output_hidden_states=True, use_cache=False)
    scale = own.logits.abs().max()
    states = target.hidden_states(texts, None, range(n + 1))
    for k in range(n):
        torch.testing.assert_close(states[k], own.hidden_states[k], rtol=1e-4, atol=1e-4)
    cache, lengths = RaggedCache(2), torch.tensor([10, 7])
    target.step(texts[:, :10], cache, lengths, last_only=True)
    cache.lengths = lengths.clone()
    chunk = torch.stack([texts[row, length : length + 3] for row, length in enumerate(lengths)])
    step = target.step(chunk, cache, None, [1])
    for row, length in enumerate(lengths):
        span = slice(int(length), int(length) + 3)
        assert (step.logits[row] - own.logits[row, span]).abs().max() < 1e-4 * scale
        torch.testing.assert_close(step.features[row], own.hidden_states[1][row, span], rtol=1e-4, atol=1e-4)
    # A tree: the root, two children, and below the first of them the token that the text has there.
    cache = RaggedCache(1)
    target.step(texts[:1, :10], cache, last_only=True)
    cache.lengths = torch.tensor([10])
    tree = torch.stack([texts[0, 10], texts[0, 11], texts[1, 0], texts[0, 12]])[None]
    step = target.step(tree, cache, parents=torch.tensor([[-1, -1, 0]]))
    assert (step.logits[0, [0, 1, 3]] - own.logits[0, 10:13]).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("family", WORKS)
def test_a_recipe_is_written_for_a_family(family, tmp_path):
    facts = read_facts(str(write_config(tmp_path, tiny_config(family))))
    assert facts.family == family and facts.wrapper is None or family in WRAPPERS
    for method, verdict in VERDICTS[family].items():
        if verdict == "yes":
            assert f"method: {method}" in make_recipe(facts, method)
        else:
            with pytest.raises(InitError, match=re.escape(ROWS[family][1])):
                make_recipe(facts, method)
    if VERDICTS[family]["eagle3"] == "yes":
        check_rotary(facts)
        shape = draft_shape(facts)
        sizes = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
        target = Target.from_model(tiny_model(family))
        config = Eagle3Config.for_target(target, DraftConfig(**sizes, intermediate_size=shape.inner), [1, 2, 3], 60)
        assert config.hidden_size == 32 and config.target_hidden_size == 32


@pytest.mark.parametrize("family", REFUSED)
def test_another_family_is_refused_in_one_line(family, tmp_path):
    kind = "llama4_text" if family == "llama4" else family
    path = write_config(tmp_path, CONFIG_MAPPING[kind]())
    with pytest.raises(UserError) as caught:
        read_facts(str(path), f"some/{family}")
    message = str(caught.value)
    assert ROWS[family][1] in message and "\n" not in message, message


@pytest.mark.parametrize("family", ["llama4", "mistral3"])
def test_a_wrapper_is_loaded_from_a_folder(family, tmp_path):
    model = tiny_model(family, std=0.2)
    target = load_target(str(save(tmp_path, model, make_tokenizer(260))), device="cpu")
    ids = torch.randint(9, 270, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids, use_cache=False).logits
    found = target.head()(target.hidden_states(ids, None, [target.num_layers])[target.num_layers])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_a_target_is_refused_before_its_weights_are_read(tmp_path):
    write_config(tmp_path, tiny_config("qwen3_next"))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(TargetError, match="running state"):
        load_target(str(tmp_path))


def test_a_hybrid_family_without_such_layers_is_taken():
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16}
    assert unsupported(tiny_config("granitemoehybrid", layer_types=["full_attention"] * 4, **sizes)) is None
    mixed = ["linear_attention", *["full_attention"] * 3]
    assert "running state" in unsupported(tiny_config("granitemoehybrid", layer_types=mixed, **sizes))


def test_chunked_masks_by_hand():
    assert visible(torch.tensor([[2, 3, 4]]), 5, chunk=3).int().tolist() == [
        [[[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
    ]
    # Two entries of one row, then a root at position 2 and two children at 3, in the next chunk: they see not even it.
    family = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    mask = visible_tree(torch.tensor([2]), family, 5, depth=torch.tensor([[0, 1, 1]]), chunk=3)
    assert mask.int().tolist() == [[[[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]]]


def test_attention_scaled_by_position_is_exact_or_refused():
    """Llama 4 scales queries in steps of floor_scale positions, counted behind the longest row of a batch."""
    model = tiny_model("llama4_text", std=0.2, attn_temperature_tuning=True, floor_scale=8, attn_scale=2.0)
    target = Target.from_model(model)
    texts = torch.randint(9, 270, (2, 20), generator=torch.Generator().manual_seed(1))
    own = model(input_ids=texts, use_cache=False).logits
    cache = RaggedCache(2)
    target.step(texts[:, :9], cache)
    cache.lengths = torch.tensor([9, 9])
    step = target.step(texts[:, 9:20], cache)
    torch.testing.assert_close(step.logits, own[:, 9:20], rtol=1e-4, atol=1e-4)
    cache.lengths = torch.tensor([12, 9])  # Both in the second step: one scale for both.
    torch.testing.assert_close(target.step(texts[:, 12:13], cache).logits[0], own[0, 12:13], rtol=1e-4, atol=1e-4)
    cache.lengths = torch.tensor([9, 3])
    with pytest.raises(TargetError, match="rows of one step"):
        target.step(texts[:, 9:10], cache)
