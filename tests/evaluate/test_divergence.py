"""First divergences: planted tokens give position, margin and ulps that plain forwards and bit patterns confirm."""

import math

import pytest
import torch

from drafttrain.evaluate.divergence import first_divergence
from drafttrain.target import Target
from tests.tiny_drafts import LONG, make_target, plain
from tests.tiny_models import make_model, tokens

PROMPT = tokens(1, 6)[0].tolist()


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def text(target):
    return plain(target, [PROMPT], 12)[0]


def logits_after(target, context):
    """The model's own logits behind a text, without this package's step or cache."""
    return target.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]


def test_equal_texts_do_not_diverge(target, text):
    assert first_divergence(target, PROMPT, text, list(text)) is None
    assert first_divergence(target, PROMPT, tuple(text), text) is None


@pytest.mark.parametrize("position", [0, 5, 11])
def test_a_planted_token_is_found_with_its_margin(target, text, position):
    planted = list(text)
    planted[position] = (text[position] + 1) % 99
    if position < 9:
        planted[position + 2] = 5  # What follows the first difference does not matter.
    found = first_divergence(target, PROMPT, planted, text)
    logits = logits_after(target, PROMPT + text[:position])
    margin = float(logits[text[position]] - logits[planted[position]])
    assert (found["position"], found["token"], found["plain_token"]) == (position, planted[position], text[position])
    assert margin > 0 and found["margin"] == pytest.approx(margin, rel=1e-3, abs=1e-5)
    larger = max(abs(float(logits[planted[position]])), abs(float(logits[text[position]])))
    spacing = 2.0 ** (math.floor(math.log2(larger)) - 23)  # fp32 has 23 bits behind the leading one
    assert found["ulps"] == pytest.approx(found["margin"] / spacing)


@pytest.mark.parametrize(("near", "ulps"), [(4.0, 0), (4.03125, 1), (4.0625, 2), (4.25, 8)])
def test_ulps_of_bf16_by_hand(near, ulps):
    """Between 4 and 8 neighbouring bf16 numbers are 2**-5 apart: an output head that gives token 9 the logit `near`
    and token 8 the logit 4 puts them (near - 4) / 2**-5 ulps apart."""
    target = Target.from_model(make_model("Llama", **LONG).bfloat16())
    with torch.no_grad():
        target.lm_head_weight.zero_()
        final = target.hidden_states(torch.tensor([PROMPT]), None, [target.num_layers])[target.num_layers][0, -1]
        channel = int(target.final_norm(final).float().abs().argmax())
        target.final_norm.weight.zero_()[channel] = 1.0
        scale = 4.0 / target.final_norm(final).double()[channel]
        target.final_norm.weight[channel] = scale
        unit = target.final_norm(final).double()[channel]
        target.lm_head_weight[8, channel], target.lm_head_weight[9, channel] = 4.0 / unit, near / unit
    logits = logits_after(target, PROMPT)
    found = first_divergence(target, PROMPT, [8, 1], [9, 1])
    assert (float(logits[8]), float(logits[9])) == (4.0, near)
    assert (found["margin"], found["ulps"]) == (near - 4.0, ulps)


def test_one_text_is_shorter(target, text):
    found = first_divergence(target, PROMPT, text[:7], text)
    assert found == {"position": 7, "token": None, "plain_token": text[7], "margin": None, "ulps": None}
    found = first_divergence(target, PROMPT, text, text[:7])
    assert found == {"position": 7, "token": text[7], "plain_token": None, "margin": None, "ulps": None}
