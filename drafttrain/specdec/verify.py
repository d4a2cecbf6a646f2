"""Verification of a drafted chain or tree: which drafts stand, and the one token that follows them.

Speculative sampling (arXiv 2211.17192, 2302.01318): a draft x is accepted with probability min(1, p(x) / q(x)); after
the first refusal one replacement is drawn from norm(max(0, p - q)); when all stand one bonus token is drawn from p.
The output is distributed exactly as p. With temperature 0 a draft stands iff it is the target's argmax.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafts.base import Proposal
from drafttrain.errors import UserError
from drafttrain.nn.sampling import Sampling, greedy_choice, inverse_cdf, warp
from drafttrain.nn.tree import chain_parents


class AcceptanceError(UserError):
    """An acceptance rule whose numbers make no sense."""


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): x stands iff p(x) > min(epsilon, delta exp(-H(p))).

    LOSSY: the output is no longer distributed as the target's. Never part of a lossless claim.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        if not (0 < self.epsilon < 1 and self.delta > 0):
            raise AcceptanceError(
                f"typical acceptance has epsilon {self.epsilon} and delta {self.delta}; expected epsilon between 0 and "
                "1 and delta above 0, e.g. 0.09 and 0.3"
            )


@dataclass(frozen=True)
class Synthetic:
    """Acceptance at given joint per-position rates, whatever was drafted: it measures the system apart from the draft.

    The text means nothing, and neither do its acceptance figures.
    """

    rates: tuple[float, ...]

    def __post_init__(self):
        falling = all(high >= low for high, low in zip((1.0, *self.rates), self.rates, strict=False))
        if not self.rates or not falling or self.rates[-1] < 0:
            raise AcceptanceError(
                f"synthetic acceptance has the rates {list(self.rates)}; expected joint rates within 0..1 that never "
                "rise: position i counts rounds whose first i drafts all stand, e.g. 0.8,0.6,0.4"
            )


def verify(
    logits: Tensor,
    proposal: Proposal,
    sampling: Sampling,
    uniforms: Tensor,
    acceptance: Typical | Synthetic | None = None,
) -> tuple[Tensor, Tensor]:
    """The accepted nodes int64 [B, D] from the root down, -1 padded, and the token after them int64 [B]; on the CPU.

    logits [B, N+1, V]: the target's raw logits at the last committed token and at each of the proposal's N nodes;
    uniforms float64 [B, N+1]: one for the acceptance of each node, then, at lengths[b], one for the final token.
    Raises SamplingError on NaN logits.
    """
    if isinstance(acceptance, Synthetic):
        if proposal.parents is not None:
            raise AcceptanceError("synthetic acceptance was asked for a tree; expected a chain. Mend: leave --tree out")
        return _verify_synthetic(logits, proposal, sampling, uniforms, acceptance)
    if acceptance is not None:
        return _verify_typical(logits, proposal, sampling, uniforms, acceptance)
    if proposal.parents is None:
        accepted, next_token = verify_chain(logits, proposal, sampling, uniforms)
        nodes = torch.arange(max(int(accepted.max()), 1)).expand(len(accepted), -1)
        return nodes.masked_fill(nodes >= accepted[:, None], -1), next_token
    return _verify_tree(logits, proposal, sampling, uniforms)


def verify_chain(logits: Tensor, proposal: Proposal, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted drafts int64 [B] and the token after them int64 [B], both on the CPU.

    logits [B, K+1, V]: the target's raw logits after the last committed token and after each draft; uniforms float64
    [B, K+1]: lengths[b] numbers for acceptance, then one for the final token. Raises SamplingError on NaN logits.
    """
    if sampling.greedy:
        return _verify_greedy(logits, proposal)
    B, K = proposal.tokens.shape
    device = logits.device
    tokens, lengths = proposal.tokens.to(device), proposal.lengths.to(device)
    p = warp(logits, sampling)
    p_drafted = p[:, :K].gather(-1, tokens[..., None])[..., 0]
    q_drafted = torch.ones_like(p_drafted) if proposal.q is None else _q_of_tokens(proposal, tokens)
    drafted = torch.arange(K, device=device) < lengths[:, None]
    # Strictly less: p(x) = 0 is never accepted, and p(x) >= q(x) always is, because the uniform is below 1.
    stands = (uniforms[:, :K].to(device) * q_drafted.double() < p_drafted.double()) & drafted
    accepted = stands.long().cumprod(1).sum(1)
    rows = torch.arange(B, device=device)
    final = p[rows, accepted]
    refused = accepted < lengths
    if refused.any():
        final = torch.where(refused[:, None], _residual(final, proposal, tokens, accepted, rows), final)
    final_uniform = uniforms.to(device)[rows, lengths]
    return accepted.cpu(), inverse_cdf(final, final_uniform).cpu()


def _verify_synthetic(
    logits: Tensor, proposal: Proposal, sampling: Sampling, uniforms: Tensor, acceptance: Synthetic
) -> tuple[Tensor, Tensor]:
    # The exact rule's work, so that the times are those of a draft that good.
    if sampling.greedy:
        choice = greedy_choice(logits).cpu()
    else:
        choice = inverse_cdf(warp(logits, sampling), uniforms.to(logits.device)).cpu()
    K = proposal.tokens.shape[1]
    joint = torch.tensor((*acceptance.rates, *[0.0] * K), dtype=torch.float64)[:K]
    # One uniform a round: u < joint[i] for exactly the first drafts, as often as the rates say.
    stands = (uniforms[:, :1] < joint) & (torch.arange(K) < proposal.lengths[:, None])
    nodes = torch.arange(K).expand_as(stands).masked_fill(~stands, -1)
    if not K:
        nodes = torch.full((len(choice), 1), -1)
    return nodes, choice.gather(1, stands.sum(1, keepdim=True))[:, 0]


def _verify_tree(logits: Tensor, proposal: Proposal, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Level by level from the root, all rows at once; at a node its children are tried in their order.

    Exact for several candidates: a refused child is taken out of p (its q subtracted, the rest of q renormalised: it
    was drawn without replacement), and the next one is tried against what is left (SpecInfer, arXiv 2305.09781,
    section 4.3, and for draws without replacement arXiv 2402.14160). The children's order is the proposal's.
    """
    B, N = proposal.tokens.shape
    device, rows = logits.device, torch.arange(B)
    real = torch.arange(N) < proposal.lengths[:, None]
    choice = greedy_choice(logits).cpu() if sampling.greedy else None
    at = torch.full((B,), -1)  # The node each row has reached.
    path, going, next_token = [], torch.ones(B, dtype=torch.bool), torch.zeros(B, dtype=torch.long)
    while going.any():
        children = (proposal.parents == at[:, None]) & real & going[:, None]
        if choice is not None:
            fits = children & (proposal.tokens == choice[rows, at + 1][:, None])
            found, node, final = fits.any(1), fits.long().argmax(1), choice[rows, at + 1]
        else:
            p = warp(logits[rows.to(device), (at + 1).to(device)], sampling)
            found, node, p = _try_children(p, proposal, children, uniforms)
            final = inverse_cdf(p, uniforms[rows, proposal.lengths].to(device)).cpu()
        next_token = torch.where(going & ~found, final, next_token)
        going = going & found
        at = torch.where(going, node, at)
        path.append(torch.where(going, node, -1))
    return torch.stack(path, 1), next_token


def _try_children(p: Tensor, proposal: Proposal, children: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows accept a child, which one, and what is left of p [B, V] for those that accept none.

    p: the target's distribution at each row's node; children bool [B, N].
    """
    rows, q = torch.arange(len(p)), None
    found, chosen = torch.zeros(len(p), dtype=torch.bool), torch.zeros(len(p), dtype=torch.long)
    while (trying := children.any(1) & ~found).any():
        node = children.long().argmax(1)
        children = children & ~F.one_hot(node, children.shape[1]).bool()
        at = rows.to(p.device)
        token = proposal.tokens[rows, node].to(p.device)
        if proposal.q is not None and q is None:
            q = proposal.q[at, node.to(p.device)]
        p_token = p[at, token]
        q_token = torch.ones_like(p_token) if q is None else _lookup(q, proposal.q_ids, token)
        stands = uniforms[rows, node].to(p.device) * q_token.double() < p_token.double()
        refused = trying.to(p.device) & ~stands
        if q is None:
            p = _without(p, p.scatter(1, token[:, None], 0.0), refused)
        else:
            p = _without(p, p.index_add(1, proposal.q_ids, q, alpha=-1).clamp_min(0), refused)
            q = _without(q, q * (proposal.q_ids != token[:, None]), refused)
        accepted = trying & stands.cpu()
        chosen, found = torch.where(accepted, node, chosen), found | accepted
    return found, chosen, p


def _without(before: Tensor, left: Tensor, refused: Tensor) -> Tensor:
    """What is left [B, V] of a distribution after a refusal, summing to one; as it was where nothing is left."""
    total = left.sum(1, keepdim=True)
    return torch.where(refused[:, None] & (total > 0), left / total.clamp_min(1e-38), before)


def _verify_typical(
    logits: Tensor, proposal: Proposal, sampling: Sampling, uniforms: Tensor, acceptance: Typical
) -> tuple[Tensor, Tensor]:
    """The deepest node whose whole path is typical (the first of equals), then one token drawn from p behind it."""
    B, N = proposal.tokens.shape
    parents = chain_parents(B, N) if proposal.parents is None else proposal.parents
    rows, device = torch.arange(B), logits.device
    depth = torch.zeros(B, N + 1, dtype=torch.long)  # 0: not on a typical path; the root is 1.
    depth[:, 0] = 1
    for i in range(N):
        p = warp(logits[rows.to(device), (parents[:, i] + 1).to(device)], sampling)
        bound = (acceptance.delta * (-torch.special.entr(p).sum(-1)).exp()).clamp_max(acceptance.epsilon)
        stands = (p.gather(1, proposal.tokens[:, i : i + 1].to(device))[:, 0] > bound).cpu() & (i < proposal.lengths)
        before = depth[rows, parents[:, i] + 1]
        depth[:, i + 1] = torch.where(stands & (before > 0), before + 1, 0)
    at = depth.argmax(1) - 1
    p = warp(logits[rows.to(device), (at + 1).to(device)], sampling)
    next_token = inverse_cdf(p, uniforms[rows, proposal.lengths].to(device)).cpu()
    path = torch.full((B, max(int(depth.max()) - 1, 1)), -1)
    for step in range(int(depth.max()) - 1, 0, -1):
        here = (at >= 0) & (depth[rows, at + 1] == step + 1)
        path[here, step - 1] = at[here]
        at = torch.where(here, parents[rows, at.clamp_min(0)], at)
    return path, next_token


def _lookup(q: Tensor, q_ids: Tensor, tokens: Tensor) -> Tensor:
    """q [B, Vd] at one target token a row [B]."""
    index = torch.searchsorted(q_ids, tokens).clamp_max(len(q_ids) - 1)
    return q.gather(1, index[:, None])[:, 0] * (q_ids[index] == tokens)


def _verify_greedy(logits: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    choice = greedy_choice(logits).cpu()
    K = proposal.tokens.shape[1]
    stands = (choice[:, :K] == proposal.tokens) & (torch.arange(K) < proposal.lengths[:, None])
    accepted = stands.long().cumprod(1).sum(1)
    return accepted, choice.gather(1, accepted[:, None])[:, 0]


def _q_of_tokens(proposal: Proposal, tokens: Tensor) -> Tensor:
    """q of each drafted token [B, K]: q lives on the draft vocabulary, whose ids rise strictly."""
    index = torch.searchsorted(proposal.q_ids, tokens).clamp_max(len(proposal.q_ids) - 1)
    known = proposal.q_ids[index] == tokens
    return proposal.q.gather(-1, index[..., None])[..., 0] * known


def _residual(p: Tensor, proposal: Proposal, tokens: Tensor, accepted: Tensor, rows: Tensor) -> Tensor:
    """max(0, p - q) [B, V] at each row's refused draft; p itself where nothing is left of it (p == q up to
    rounding).
    """
    at = accepted.clamp_max(tokens.shape[1] - 1)
    if proposal.q is None:
        rest = p.scatter(1, tokens[rows, at][:, None], 0.0)
    else:
        rest = p.index_add(1, proposal.q_ids, proposal.q[rows, at], alpha=-1).clamp_min(0)
    return torch.where(rest.sum(1, keepdim=True) > 0, rest, p)
