"""Small drafts cut from tiny targets, with a tokenizer on both."""

import torch

from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.students import build_student
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target
from tests.tiny_models import V, make_model, make_tokenizer

IDS = torch.tensor(sorted({0, 1, 2, *range(7, V, 2)}))


def make_target(family: str = "Qwen3", **changes) -> Target:
    model = make_model(family, max_position_embeddings=256, **changes)
    return Target.from_model(model, make_tokenizer(), name=f"tiny {family}")


def make_draft(target: Target, ids=None, layers=(0, 3, 7), **settings) -> KdDraft:
    student = build_student(DraftConfig(**settings), target, list(layers))
    return KdDraft(student, ids, name="small").attach(target)


def trained(target: Target, ids=None, **settings) -> KdDraft:
    """A draft whose trained weights have moved."""
    draft = make_draft(target, ids, **settings)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in draft.trained_state().values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return draft
