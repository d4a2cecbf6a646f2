"""Rotary tables against transformers' own embedding of each target and its init functions, against the papers'
formulas, and their growth."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.nn.rotary import ROPE_TYPES, RotaryTable, rotate
from tests.tiny_drafts import make_target

PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
SCALINGS = {
    "default": PLAIN,
    "linear": {**PLAIN, "rope_type": "linear", "factor": 4.0},
    "llama3": {
        **PLAIN,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def table_of(target) -> RotaryTable:
    rope = target.rope()
    return RotaryTable(target.head_dim, rope["rope_theta"], rope["rope_scaling"], target.max_positions)


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_the_targets_own_angles(kind):
    target = make_target(rope_parameters=SCALINGS[kind])
    positions = torch.tensor([[0, 1, 2, 63, 64, 255], [5, 6, 7, 8, 9, 100]])
    cos, sin = table_of(target)(positions, torch.float32)
    own_cos, own_sin = target.decoder.rotary_emb(torch.zeros(1), positions)
    torch.testing.assert_close(cos[:, 0], own_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0], own_sin, rtol=0, atol=1e-6)
    if kind != "default":
        plain = make_target(rope_parameters=PLAIN)
        assert (table_of(plain)(positions, torch.float32)[0] - cos).abs().max() > 0.01


def by_formula(kind: str, dim: int) -> tuple[list[float], float]:
    """Angles of position 1 and the scale of cos and sin: RoPE (arXiv 2104.09864), position interpolation (2306.15595),
    Llama 3.1's smoothing, and YaRN (2309.00071, section 3) with its default beta 32 and 1."""
    scaling = SCALINGS[kind]
    theta, factor = scaling["rope_theta"], scaling.get("factor", 1.0)
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "llama3":
        length, low, high = (
            scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        shares = [(length * angle / (2 * math.pi) - low) / (high - low) for angle in plain]
    elif kind == "yarn":
        length = scaling["original_max_position_embeddings"]
        first, last = (dim * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (32, 1))
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        shares = [1 - (i - first) / (last - first) for i in range(dim // 2)]
    else:
        shares = [0.0] * len(plain)
    kept = [min(max(share, 0.0), 1.0) for share in shares]
    angles = [angle * (share + (1 - share) / factor) for angle, share in zip(plain, kept, strict=True)]
    return angles, 0.1 * math.log(factor) + 1 if kind == "yarn" else 1.0


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_angles_of_transformers_init_functions_and_of_the_formulas(kind):
    for dim in (8, 64):
        scaling = {key: value for key, value in SCALINGS[kind].items() if key != "rope_theta"}
        table = RotaryTable(dim, SCALINGS[kind]["rope_theta"], scaling, 256)
        cos, sin = table(torch.tensor([[1]]), torch.float32)
        angles, scale = by_formula(kind, dim)
        expected = torch.tensor(angles + angles, dtype=torch.float64)
        torch.testing.assert_close(cos[0, 0, 0].double(), expected.cos() * scale, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin[0, 0, 0].double(), expected.sin() * scale, rtol=0, atol=1e-6)
        if kind == "default":
            continue
        config = LlamaConfig(head_dim=dim, max_position_embeddings=256, rope_parameters=dict(SCALINGS[kind]))
        inverse, theirs = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        torch.testing.assert_close(table._inverse, inverse, rtol=0, atol=0)
        assert theirs == pytest.approx(scale)


@pytest.mark.parametrize("family", ["GptOss", "Gemma3"])
def test_the_full_attention_entry_of_families_with_settings_of_their_own(family):
    target = make_target(family)
    positions = torch.arange(40)[None]
    cos, _ = table_of(target)(positions, torch.float32)
    arguments = (torch.zeros(1), positions) + (("full_attention",) if family == "Gemma3" else ())
    own, _ = target.decoder.rotary_emb(*arguments)
    torch.testing.assert_close(cos[:, 0, :, : own.shape[-1]], own, rtol=0, atol=1e-6)


def test_rotation_by_hand():
    """One pair (D = 2) turns by the position in radians."""
    x, table = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]]), RotaryTable(2, 10000.0, None, 16)
    turned = rotate(x, *table(torch.tensor([[1, 2]]), torch.float32))
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    expected = torch.stack([torch.stack([one.cos(), one.sin()]), 2 * torch.stack([-two.sin(), two.cos()])])
    torch.testing.assert_close(turned[0, 0], expected)


def test_the_table_grows_with_positions_but_not_with_changes_of_dtype():
    table, positions = RotaryTable(8, 10000.0, None, 64), torch.tensor([[0, 300]])
    wide = table(positions, torch.float32)[0]
    for _ in range(6):
        narrow = table(positions, torch.bfloat16)[0]
        assert torch.equal(table(positions, torch.float32)[0], wide)
    assert torch.equal(narrow, wide.bfloat16()) and len(table._cos) <= 1024
    assert table(torch.tensor([[5000]]), torch.float32)[0].shape == (1, 1, 1, 8)


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="rope_type is 'dynamic'"):
        RotaryTable(8, 10000.0, {"rope_type": "dynamic"}, 64)
