"""Quantised small models: codes and scales against sums by hand, the kernels against plain multiplication, an untouched
original, and drafts whose acceptance stays exact.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.quantized import BLOCK, PackedWeight, pack, quantize_with_torchao, quantized
from drafttrain.drafts.small_model import SmallModelProposer, prune_layers, with_head_rows
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling
from drafttrain.specdec.decode import generate
from tests.tiny_drafts import make_target, plain
from tests.tiny_models import V, tokens

PROMPT = tokens(1, 6)[0].tolist()
KINDS = ["int8", "int4"]


def random_weight(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def rounded(weight, kind):
    """The weight on the grid of its kind, in double: 255 levels a row around 0, or 16 from the least to the greatest of
    each 32 columns; steps and middles are numbers of the weight's dtype.
    """
    values = weight.double()
    if kind == "int8":
        step = (values.abs().amax(1, keepdim=True) / 127).to(weight.dtype).double()
        return (values / step).round().clamp(-127, 127) * step
    groups = values.view(len(values), -1, 32)
    step = ((groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15).to(weight.dtype).double()
    middle = (groups.amin(-1, keepdim=True) + 8 * step).to(weight.dtype).double()
    return (middle + ((groups - middle) / step).round().clamp(-8, 7) * step).view_as(values)


@pytest.fixture(scope="module", params=["Gemma3", "Llama"])
def model(request):
    """With a tied head, and without."""
    changes = {"tie_word_embeddings": True} if request.param == "Gemma3" else {}
    return make_target(request.param, hidden_size=64, intermediate_size=96, **changes)


def test_int8_codes_by_hand():
    weight = torch.tensor([[127.0, -63.4, 0.6] + [0.0] * 13, [0.5, -0.25, 0.0] + [0.0] * 13])
    packed = pack(weight, "int8")
    assert packed.codes[:, :3].tolist() == [[127, -63, 1], [127, -64, 0]]
    assert packed.scales.tolist() == [1.0, pytest.approx(0.5 / 127)]
    assert packed.linear(torch.eye(16)[:3])[:, 0].tolist() == [127.0, -63.0, 1.0]


def test_int4_levels_by_hand():
    """Group 0 runs from -8 to 7 in steps of 1, group 1 from 0 to 30 in steps of 2."""
    weight = torch.zeros(1, 64)
    weight[0, :3], weight[0, 32:35] = torch.tensor([-8.0, 7.0, 2.6]), torch.tensor([30.0, 4.4, 25.2])
    packed = pack(weight, "int4")
    assert packed.scales[:, 0].tolist() == [[1.0, 0.0], [2.0, 16.0]]
    values = packed.linear(torch.eye(64))[:, 0]
    assert values[:4].tolist() == [-8.0, 7.0, 3.0, 0.0] and values[32:36].tolist() == [30.0, 4.0, 26.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(99, 32), (1, 64), (7, 96), (BLOCK + 40, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_multiplies_by_the_rounded_weight(kind, shape, dtype):
    """Odd numbers of rows, more rows than are packed at a time, inputs of every form, none at all, and a bias."""
    weight, bias = random_weight(*shape, dtype), random_weight(1, shape[0], dtype)[0]
    packed = nn.Parameter(pack(weight, kind), requires_grad=False)
    assert isinstance(packed, PackedWeight) and packed.shape == weight.shape and packed.dtype == dtype
    reference = rounded(weight, kind)
    loose = 1e-3 if dtype == torch.float32 else 0.01
    for inputs in (random_weight(3, shape[1], dtype), random_weight(shape[1], 10, dtype).T.view(2, 5, -1)):
        expected = inputs.double() @ reference.T
        for found, wanted in ((F.linear(inputs, packed), expected), (F.linear(inputs, packed, bias), expected + bias)):
            assert found.dtype == dtype and found.shape == wanted.shape
            assert (found.double() - wanted).norm() <= loose * wanted.norm()
    assert F.linear(weight[:0], packed).shape == (0, shape[0])


def test_constant_rows_and_groups():
    weight = torch.cat([torch.zeros(1, 32), torch.full((1, 32), 0.75)])
    for kind in KINDS:
        torch.testing.assert_close(F.linear(torch.eye(32), pack(weight, kind)).T, weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_layers_are_packed_and_the_original_stays(model, kind):
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    logits = model.model(tokens()).logits
    small = quantized(model, kind)
    linear = {name: m for name, m in small.model.named_modules() if isinstance(m, nn.Linear)}
    assert len(linear) == 7 * model.num_layers + 1
    assert all(m.weight.kind == kind and isinstance(m.weight, PackedWeight) for m in linear.values())
    assert small.embed_weight is model.embed_weight and small.final_norm.weight is model.final_norm.weight
    assert isinstance(small.lm_head_weight, PackedWeight) and not small.config.tie_word_embeddings
    assert small.name == f"{model.name}, {kind}" and small.tokenizer is model.tokenizer
    after = model.model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model.model(tokens()).logits, logits)
    assert model.config.tie_word_embeddings == (model.embed_weight is model.lm_head_weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gives_the_logits_of_the_rounded_weights(model, kind):
    """Through the cache and the head that drafting uses, against a dense model with every weight on the grid."""
    small, dense = quantized(model, kind), prune_layers(model, range(model.num_layers)).model
    for module in dense.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded(module.weight, kind).float(), requires_grad=False)
    expected = dense(tokens()).logits
    found = small.step(tokens(), RaggedCache(2)).logits
    assert (found - expected).norm() <= 1e-3 * expected.norm()
    far = (found - model.model(tokens()).logits).norm() / expected.norm()
    assert far > (0.003 if kind == "int8" else 0.03)


def test_layers_of_other_widths_are_left_as_they_are():
    """48 columns are no groups of 32, and 33 no steps of 16."""
    model = make_target("Llama", intermediate_size=48)
    down = [layer.mlp.down_proj.weight for layer in quantized(model, "int4").layers]
    assert all(weight is layer.mlp.down_proj.weight for weight, layer in zip(down, model.layers, strict=True))
    assert all(isinstance(layer.mlp.down_proj.weight, PackedWeight) for layer in quantized(model, "int8").layers)
    odd = make_target("Llama", hidden_size=24, intermediate_size=40, num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(DraftError, match="no linear layer whose input width is a multiple of 16, as int8"):
        quantized(odd, "int8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, draft_mode="probabilistic", seed=5)])
def test_drafting_with_quantised_weights(model, kind, sampling):
    """The target's own weights, rounded, are accepted often but not always; the greedy text is the target's."""
    proposer = SmallModelProposer(quantized(model, kind))
    done = generate(model, [PROMPT], proposer, k=3, sampling=sampling, max_new_tokens=64, stop_ids=())
    counts = done.counts
    assert (0.6 if kind == "int8" else 0.1) * counts.drafted <= counts.accepted < counts.drafted
    if sampling.greedy:
        assert done.generations[0].tokens == plain(model, [PROMPT], 64)[0]


def test_q_is_what_the_quantised_model_samples_from(model):
    """The proposal's q is the softmax of its own logits, not of the model's before."""
    sampling = Sampling(1.0, draft_mode="probabilistic", seed=5)
    seen, small = [], quantized(model, "int4")

    class Watched(SmallModelProposer):
        def propose(self, k, stop=None):
            seen.append(super().propose(k, stop))
            return seen[-1]

    done = generate(model, [PROMPT], Watched(small), k=1, sampling=sampling, max_new_tokens=2, stop_ids=())
    text = torch.tensor([[*PROMPT, done.generations[0].tokens[0]]])
    expected = small.model(text).logits[0, -1].softmax(-1)
    torch.testing.assert_close(seen[0].q[0, 0], expected, rtol=1e-3, atol=1e-5)
    assert (expected - model.model(text).logits[0, -1].softmax(-1)).abs().max() > 1e-3


def test_a_head_of_chosen_rows_is_cut_before_packing(model):
    ids = torch.arange(1, V, 3)
    small = quantized(with_head_rows(model, ids), "int8")
    found = small.step(tokens(), RaggedCache(2)).logits
    expected = quantized(model, "int8").step(tokens(), RaggedCache(2)).logits[..., ids]
    torch.testing.assert_close(found, expected)
    with pytest.raises(NotImplementedError, match="can only be multiplied by"):
        small.lm_head_weight[ids[:3]]


def test_errors(model, monkeypatch):
    with pytest.raises(DraftError, match="'int3'. Expected int8 or int4"):
        quantized(model, "int3")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(DraftError, match=r"torchao. Mend: pip install 'drafttrain\[quantize\]'"):
        quantize_with_torchao(model.model, [], "int4")
