"""Where a speculative output leaves the plain one, and by how narrow a margin the target chose there."""

from collections.abc import Sequence
from typing import Any

import torch

from drafttrain.nn.cache import RaggedCache
from drafttrain.target import Target


@torch.no_grad()
def first_divergence(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], plain: Sequence[int]
) -> dict[str, Any] | None:
    """None where both outputs are the same; otherwise {position, token, plain_token, margin, ulps} of the first
    difference.

    margin: the target's logit of the plain token less that of the other, from one forward over the common text; ulps:
    the same in units of the dtype's spacing at that magnitude. Products of other shapes round differently: in bf16 a
    tie within 2 ulps is not a fault.
    """
    if list(tokens) == list(plain):
        return None
    shared = min(len(tokens), len(plain))
    position = next((i for i in range(shared) if tokens[i] != plain[i]), shared)
    if position == shared:  # One output goes on where the other ended.
        token = tokens[position] if len(tokens) > shared else None
        plain_token = plain[position] if len(plain) > shared else None
        return {"position": position, "token": token, "plain_token": plain_token, "margin": None, "ulps": None}
    context = torch.tensor([[*prompt, *plain[:position]]])
    logits = target.step(context, RaggedCache(1, context.shape[1]), last_only=True).logits[0, 0]
    ours, theirs = logits[tokens[position]], logits[plain[position]]
    margin = float(theirs.double() - ours.double())
    larger = torch.maximum(ours.abs(), theirs.abs())
    spacing = float(torch.nextafter(larger, larger.new_tensor(torch.inf)).double() - larger.double())
    return {
        "position": position,
        "token": int(tokens[position]),
        "plain_token": int(plain[position]),
        "margin": margin,
        "ulps": margin / spacing,
    }
