"""Narrow new students: sizes, the low-rank start against a singular value decomposition, and the first loss."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.fresh_student import fresh_config, low_rank
from drafttrain.drafts.students import build_student
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target
from tests.tiny_drafts import make_target
from tests.tiny_models import FAMILIES, V, make_model, tokens

FULL, SLIDING = "full_attention", "sliding_attention"


def fresh(target, seed=0, **settings):
    return build_student(DraftConfig(student="fresh", **{"hidden_size": 16} | settings), target, seed=seed)


def sizes(config):
    return (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size)


def loss(model, input_ids):
    labels = torch.randint(V, input_ids.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        log_p = model(input_ids).logits.float().log_softmax(-1)
    return -log_p.gather(-1, labels[..., None]).mean().item()


@pytest.mark.parametrize("rank", [1, 5, 16, 32])
def test_the_factor_is_as_near_as_the_singular_values_allow(rank):
    table = torch.randn(300, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.1, 32)
    factor = low_rank(table, rank)
    basis = torch.linalg.lstsq(factor.double(), table.double()).solution
    error = (table - factor.double() @ basis).square().sum()
    left_out = torch.linalg.svdvals(table.double())[rank:].square().sum()
    assert error == pytest.approx(left_out.item(), rel=1e-4, abs=1e-4)
    assert torch.allclose(basis @ basis.T, torch.eye(rank, dtype=torch.float64), atol=1e-4)  # A P with orthonormal P.
    assert torch.equal(factor, low_rank(table.clone(), rank))


def test_the_factor_of_a_bf16_table_is_fp32_whatever_the_sign_of_the_vectors():
    table = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    factor = low_rank(table, 3)
    assert factor.dtype == torch.float32
    _, _, right = torch.linalg.svd(table.float(), full_matrices=False)
    for column, vector in zip(factor.T, right[:3], strict=True):
        sign = vector[vector.abs().argmax()].sign()
        assert torch.allclose(column, table.float() @ (vector * sign), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_student_starts_near_ln_v_trains_and_loads_again(family, tmp_path):
    target = make_target(family)
    student = fresh(target)
    assert type(student) is type(target.model)
    assert student.config.vocab_size == V
    assert student.config.num_hidden_layers == 2
    assert loss(student, tokens(8, 20)) <= math.log(V) + 0.5
    assert all(p.requires_grad and p.dtype == torch.float32 for p in student.parameters())
    tied = target.lm_head_weight is target.embed_weight
    head, embedding = student.get_output_embeddings().weight, student.get_input_embeddings().weight
    assert (head is embedding) == tied
    assert torch.allclose(embedding, low_rank(target.embed_weight, 16))
    assert torch.allclose(head, low_rank(target.lm_head_weight, 16))
    student(tokens()).logits.square().sum().backward()
    assert embedding.grad.abs().sum() > 0
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.allclose(again(tokens()).logits, student.eval()(tokens()).logits, atol=1e-5)


def test_a_bias_of_the_head_does_not_count_as_a_gain_too_high():
    """Halving the gain cannot undo it, and would go on for ever."""
    model = make_model("Phi3")
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.randn(V, generator=torch.Generator().manual_seed(0)) * 3)
    student = fresh(Target.from_model(model))
    assert torch.equal(student.get_output_embeddings().bias, head.bias) if student.lm_head.bias is not None else True


def test_frozen_tables_have_the_targets_dtype():
    """Frozen weights are in no fp32 file of a run, so what is written must be all that they are."""
    target = Target.from_model(make_model("Qwen3").to(torch.bfloat16))
    student = fresh(target, train_embeddings=False)
    assert student.get_input_embeddings().weight.dtype == torch.bfloat16
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert {p.dtype for p in student.parameters() if p.requires_grad} == {torch.float32}


def test_the_first_loss_would_be_far_above_ln_v_at_full_gain():
    """The fault that the lowered gain is for: a tied model that expects the token it has just read."""
    target = Target.from_model(make_model("Gemma3", tie_word_embeddings=True))
    student = fresh(target, hidden_size=32)
    assert loss(student, tokens(8, 20)) <= math.log(V) + 0.5
    with torch.no_grad():
        student.model.norm.weight.zero_()  # Gain 1.
    assert loss(student, tokens(8, 20)) > math.log(V) + 0.5


def test_positions_rope_and_eps_are_the_targets():
    target = make_target("Llama", rms_norm_eps=3e-4, rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    config = fresh(target).config
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"], config.max_position_embeddings) == (
        3e-4,
        12345.0,
        256,
    )


def test_sizes_follow_the_targets_proportions_or_the_settings():
    target = make_target("Llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=64, intermediate_size=96)
    assert sizes(fresh_config(DraftConfig(hidden_size=32), target)) == (4, 2, 8, 48)
    assert sizes(fresh_config(DraftConfig(hidden_size=16), target)) == (2, 1, 8, 24)
    chosen = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "intermediate_size": 100}
    assert sizes(fresh_config(DraftConfig(hidden_size=32, **chosen), target)) == (8, 8, 4, 100)
    assert sizes(fresh_config(DraftConfig(hidden_size=40, num_key_value_heads=2), target))[:2] == (4, 2)
    gemma = make_target("Gemma3")
    assert fresh_config(DraftConfig(hidden_size=16, head_dim=4), gemma).query_pre_attn_scalar == 4


def test_without_a_head_dim_of_its_own_it_is_the_hidden_size_over_the_heads():
    target = make_target("Qwen2", head_dim=None)
    config = fresh_config(DraftConfig(hidden_size=24), target)
    assert (config.num_attention_heads, config.num_key_value_heads) == (3, 1)
    with pytest.raises(DraftError, match=r"heads \* head_dim = hidden_size"):
        fresh_config(DraftConfig(hidden_size=24, num_attention_heads=3, head_dim=16), target)


def test_full_attention_stays_where_the_target_has_it():
    target = make_target("Gemma3")
    pattern = target.config.layer_types
    assert pattern == [SLIDING] * 5 + [FULL] + [SLIDING] * 2
    assert fresh_config(DraftConfig(hidden_size=16, num_hidden_layers=3), target).layer_types == [
        SLIDING,
        SLIDING,
        FULL,
    ]
    deep = fresh_config(DraftConfig(hidden_size=16, num_hidden_layers=10), target)
    assert deep.layer_types == [*pattern, SLIDING, SLIDING]
    assert fresh_config(DraftConfig(hidden_size=16), make_target("GptOss")).layer_types == [SLIDING, FULL]


def test_the_seed_alone_decides_the_layers_and_tables_may_stay_frozen():
    target = make_target("Qwen3")
    one, two, other = fresh(target), fresh(target), fresh(target, seed=1, train_embeddings=False)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    frozen = {name for name, p in other.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": None}, "draft.hidden_size: 64"),
        ({"hidden_size": 40}, "at most that"),
        ({"num_attention_heads": 3}, "do not fit together"),
        ({"head_dim": 5}, "even head_dim"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, words):
    with pytest.raises(DraftError, match=words):
        fresh(make_target(), **settings)
