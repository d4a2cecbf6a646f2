"""Medusa heads with weights, biases and scales far from zero and one."""

import torch

from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.target import Target
from tests.tiny_models import V


def fresh_heads(target: Target, ids=None, heads: int = 3, **choices) -> MedusaDraft:
    config = MedusaConfig(target.hidden_size, V, V if ids is None else len(ids), heads, **choices)
    return MedusaDraft(config, ids).attach(target).initialise()


def make_heads(target: Target, ids=None, heads: int = 3, seed: int = 0, **choices) -> MedusaDraft:
    draft = fresh_heads(target, ids, heads, **choices)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        draft.input_rms.uniform_(0.5, 2)
    return draft
