"""Verification of a drafted chain: how many drafts stand, and the one token that follows them.

Speculative sampling (arXiv 2211.17192, 2302.01318): a draft x is accepted with probability min(1, p(x) / q(x)); after
the first refusal one replacement is drawn from norm(max(0, p - q)); when all stand one bonus token is drawn from p.
The output is distributed exactly as p. With temperature 0 a draft stands iff it is the target's argmax.
"""

import torch
from torch import Tensor

from drafttrain.drafts.base import Proposal
from drafttrain.nn.sampling import Sampling, greedy_choice, inverse_cdf, warp


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
