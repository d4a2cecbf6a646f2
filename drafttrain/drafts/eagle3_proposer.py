"""EAGLE-3 drafting with a KV cache: true features for accepted positions, the draft's own outputs while it runs
ahead.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafts.base import Proposal, Proposer
from drafttrain.nn.cache import RaggedCache, visible
from drafttrain.nn.sampling import Sampling, Streams, greedy_choice, inverse_cdf, warp
from drafttrain.target import TargetStep


class Eagle3Proposer(Proposer):
    """Row p of the cache holds (fused hs at p, embedding of x[p+1]). Committed rows carry the target's features only:
    what was drafted ahead is overwritten as soon as the target has spoken, as in training."""

    def __init__(self, draft):
        self.draft = draft.eval()
        self.feature_layers = draft.feature_layers
        self._ids = draft.draft_ids
        self._cache: RaggedCache | None = None

    @torch.no_grad()
    def begin(self, step: TargetStep, next_token: Tensor, sampling: Sampling, streams: Streams) -> None:
        self._sampling, self._streams = sampling, streams
        self._cache = RaggedCache(len(next_token), capacity=step.tokens.shape[1] + 128)
        tokens = torch.cat([step.tokens[:, 1:], next_token[:, None]], 1)
        tokens[torch.arange(len(tokens)), step.lengths - 1] = next_token
        self._commit(tokens, step.features, step.lengths)

    @torch.no_grad()
    def advance(self, step: TargetStep, path: Tensor, next_token: Tensor) -> None:
        lengths = (path >= 0).sum(1) + 1
        width = int(lengths.max())
        rows = torch.arange(len(path))[:, None]
        columns = torch.cat([torch.zeros(len(path), 1, dtype=torch.long), path.clamp_min(-1)[:, : width - 1] + 1], 1)
        tokens = torch.cat([step.tokens[rows, columns[:, 1:]], next_token[:, None]], 1)
        tokens[torch.arange(len(tokens)), lengths - 1] = next_token
        self._commit(tokens, step.features[rows, columns.to(step.features.device)], lengths)

    def _commit(self, tokens: Tensor, features: Tensor, lengths: Tensor) -> None:
        """Run rows with true features (tokens [B, n] follow the features' positions, `lengths` [B] of them real)."""
        hidden = self._run(tokens, self.draft.fuse(features))
        self._cache.lengths = self._cache.lengths + lengths
        if len(tokens) == 1:
            self._hidden = hidden[:, int(lengths) - 1 : int(lengths)]
        else:
            self._hidden = hidden[torch.arange(len(tokens)), lengths - 1][:, None]

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer over n new rows behind the cache: tokens [B, n], hidden [B, n, H] -> hidden [B, n, H]."""
        positions = self._cache.begin(tokens.shape[1])
        on_device = positions.to(hidden.device)
        alone = len(tokens) == 1 and tokens.shape[1] == 1

        def attend(query, key, value):
            key, value = self._cache.update(key, value, 0)
            mask = None if alone else visible(on_device, self._cache.key_count)
            grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)

        cos, sin = self.draft.rotary(on_device, hidden.dtype)
        return self.draft.midlayer(self.draft.embed(tokens.to(hidden.device)), hidden, cos, sin, attend)

    @torch.no_grad()
    def propose(self, k: Tensor) -> Proposal:
        K = int(k.max())
        if K == 0:
            return Proposal(torch.zeros(len(k), 0, dtype=torch.long), k)
        draws = self._sampling.draws_drafts
        uniforms = self._streams.uniforms(k.tolist(), K) if draws else None
        committed, hidden = self._cache.lengths, self._hidden
        tokens, distributions = [], []
        for i in range(K):
            if i:
                hidden = self._run(tokens[-1][:, None], hidden)
                self._cache.lengths = self._cache.lengths + 1
            logits = self.draft.lm_head(self.draft.norm(hidden[:, 0]))
            if draws:
                distributions.append(warp(logits, self._sampling))
                choice = inverse_cdf(distributions[-1], uniforms[:, i].to(logits.device))
            else:
                choice = greedy_choice(logits)
            tokens.append(self._ids[choice].cpu())
        self._cache.lengths = committed
        q = torch.stack(distributions, 1) if draws else None
        return Proposal(torch.stack(tokens, 1), k, None, q, self._ids if draws else None)

    def keep(self, rows: Sequence[int]) -> None:
        self._cache.keep(rows)
        self._hidden = self._hidden[torch.as_tensor(rows, device=self._hidden.device)]
