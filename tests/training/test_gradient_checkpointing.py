"""Layers that run again in the backward pass: the same losses and weights, and every layer twice."""

import pytest
import torch

from drafttrain.recipe import RecipeError, parse_recipe
from drafttrain.target import find_decoder
from tests.training.tiny_run import make_target, make_trainer, open_run, settings

STEPS = 2
METHODS = {
    "kd": {"num_hidden_layers": 3},
    "medusa": {"num_heads": 3, "lora": {"r": 4, "alpha": 4}},
}


def values_for(folder, method: str, **training) -> dict:
    values = settings(folder, max_steps=STEPS, max_tokens_per_batch=256, select_by="loss", **training)
    del values["training"]["ttt_steps"]
    values["method"], values["draft"] = method, METHODS[method]
    if method == "medusa":
        values["training"]["warmup_heads_steps"] = 0
    return values


def trained(folder, name: str, method: str, wanted: bool) -> tuple[dict, int]:
    recipe = parse_recipe(values_for(folder, method, gradient_checkpointing=wanted), folder)
    trainer, _ = make_trainer(recipe, open_run(folder / name, recipe), make_target(recipe))
    draft, calls = trainer.model, []
    layer = find_decoder(draft.student if method == "kd" else draft.model)[0].layers[1]
    layer.self_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()) if draft.training else None)
    trainer.fit()
    return draft.trained_state(), len(calls)


@pytest.mark.parametrize("method", list(METHODS))
def test_the_same_weights_from_layers_that_run_twice(tmp_path, method) -> None:
    kept, once = trained(tmp_path, "kept", method, False)
    again, twice = trained(tmp_path, "again", method, True)
    assert (once, twice) == (STEPS, 2 * STEPS)
    assert kept.keys() == again.keys()
    for name, tensor in kept.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def test_drafts_of_a_layer_or_heads_have_none(tmp_path) -> None:
    values = settings(tmp_path, gradient_checkpointing=True)
    with pytest.raises(RecipeError, match=r"training.gradient_checkpointing: is for whole models; expected method kd"):
        parse_recipe(values, tmp_path)
