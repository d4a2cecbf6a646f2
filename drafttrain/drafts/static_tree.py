"""Drafting a tree of a fixed shape, level by level, whatever the draft."""

from collections.abc import Callable

import torch
from torch import Tensor

from drafttrain.drafts.base import DraftError, Proposal
from drafttrain.nn.sampling import Sampling, Streams, inverse_cdf, warp
from drafttrain.nn.tree import StaticTree

LogitsOf = Callable[[int, list[int], Tensor], Tensor]
"""(level, parents, tokens) -> logits [B, n, Vd] behind each parent of a level's nodes; -1: the root, the only parent of
level 0. tokens int64 [B, N], on the draft's device: the target ids of all nodes of earlier levels, at their columns.
"""


def check_width(tree: StaticTree, words: int) -> None:
    """DraftError for a tree with more children at a node than the draft's vocabulary has words."""
    if max(tree.ranks) >= words:
        raise DraftError(
            f"the tree has {max(tree.ranks) + 1} children at one node, the draft's vocabulary {words} tokens. Expected "
            "at most as many. Mend: a narrower tree."
        )


def draft_static_tree(
    tree: StaticTree, k: Tensor, logits_of: LogitsOf, ids: Tensor, sampling: Sampling, streams: Streams
) -> Proposal:
    """The tree down to depth k[b] for row b (int64 [B]) over the target ids `ids` [Vd]: the likeliest children of each
    node, or draws without replacement where drafts are drawn.
    """
    K = min(int(k.max()), tree.depth)
    if not K:
        return Proposal(torch.zeros(len(k), 0, dtype=torch.long), torch.zeros_like(k))
    B, count, device = len(k), tree.count(K), ids.device
    drawn = [tree.count(limit) for limit in k.tolist()]
    draws = sampling.draws_drafts
    uniforms = streams.uniforms(drawn, count).to(device) if draws else None
    tokens = torch.zeros(B, count, dtype=torch.long, device=device)
    q = torch.zeros(B, count, len(ids), device=device) if draws else None
    for level in range(K):
        nodes = [i for i, depth in enumerate(tree.depths) if depth == level + 1]
        parents = sorted({tree.parents[i] for i in nodes})
        logits = logits_of(level, parents, tokens)
        for place, parent in enumerate(parents):
            children = [i for i in nodes if tree.parents[i] == parent]
            if draws:
                choice, first = draw_children(logits[:, place], uniforms[:, children], sampling)
                q[:, children] = first[:, None]
            else:
                choice = logits[:, place].topk(len(children), -1).indices
            tokens[:, children] = ids[choice]
    index = torch.tensor(tree.parents[:count]).expand(B, -1)
    return Proposal(tokens.cpu(), torch.tensor(drawn), index, q, ids if draws else None)


def draw_children(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Children [B, n] drawn without replacement from logits [B, Vd], and the q [B, Vd] of the first of them. Where q
    runs out of tokens the last one is drawn again from the same q: the verification does the same sum.
    """
    first = q = warp(logits, sampling)
    columns = torch.arange(logits.shape[-1], device=q.device)
    out = []
    for j in range(uniforms.shape[1]):
        out.append(inverse_cdf(q, uniforms[:, j]))
        left = q * (columns != out[-1][:, None])
        mass = left.sum(1, keepdim=True)
        q = torch.where(mass > 0, left / mass.clamp_min(1e-38), q)
    return torch.stack(out, 1), first
