"""EAGLE-3 drafting with a KV cache: true features for accepted positions, the draft's own outputs while it runs
ahead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.drafts.base import Proposal, Proposer, Stop, draft_chain
from drafttrain.drafts.eagle3_static import StaticDraft, run_layer
from drafttrain.nn.cache import RaggedCache, visible, visible_tree
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.target import TargetStep


class Eagle3Proposer(Proposer):
    """Row p of the cache holds (fused hs at p, embedding of x[p+1]). Committed rows carry the target's features only:
    what was drafted ahead is overwritten as soon as the target has spoken, as in training."""

    def __init__(self, draft):
        self.draft = draft.eval()
        self.feature_layers = draft.feature_layers
        self._ids, self._window = draft.draft_ids, draft.shape.sliding_window
        self._cache: RaggedCache | None = None
        # Captured steps by batch size; those reserved for the next request; those in use (None: plain calls).
        self._kept: dict[int, StaticDraft] = {}
        self._reserved: StaticDraft | None = None
        self._steps: StaticDraft | None = None

    @torch.no_grad()
    def reserve(self, batch: int, room: int, k: int) -> None:
        if batch not in self._kept:
            self._kept[batch] = StaticDraft(self.draft, batch)
        self._steps = self._reserved = self._kept[batch]
        self._cache = self._steps.cache
        for length in self._steps.prepare(room, k):
            # One round over nothing, so that all its steps are captured.
            self._sampling, self._streams = Sampling(), Streams(0, range(batch))
            self._hidden = self._steps.no_hidden()
            self._cache.lengths = torch.full((batch,), length)
            self.propose(torch.full((batch,), k))
            self._commit(
                torch.zeros(batch, 1, dtype=torch.long), self._steps.no_features(), torch.ones(batch, dtype=torch.long)
            )

    @torch.no_grad()
    def begin(self, step: TargetStep, next_token: Tensor, sampling: Sampling, streams: Streams) -> None:
        self._sampling, self._streams = sampling, streams
        static, self._steps, self._reserved = self._reserved, None, None
        if static is None:
            self._cache = RaggedCache(len(next_token), capacity=step.tokens.shape[1] + 128)
        else:
            self._cache = static.cache
            self._cache.reset()
        tokens = torch.cat([step.tokens[:, 1:], next_token[:, None]], 1)
        tokens[torch.arange(len(tokens)), step.lengths - 1] = next_token
        self._commit(tokens, step.features, step.lengths)
        self._steps = static

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
        if self._steps is None:
            hidden = self._run(tokens, self.draft.fuse(features))
        else:
            hidden = self._steps.commit(tokens, features)
        self._cache.lengths = self._cache.lengths + lengths
        if len(tokens) == 1:
            self._hidden = hidden[:, int(lengths) - 1 : int(lengths)]
        else:
            self._hidden = hidden[torch.arange(len(tokens)), lengths - 1][:, None]

    def _run(self, tokens: Tensor, hidden: Tensor, positions: Tensor | None = None, family=None, depth=None) -> Tensor:
        """The layers over n new rows behind the cache: tokens [B, n], hidden [B, n, H] -> hidden [B, n, H].

        positions int64 [B, n], family bool [B, n, m], depth int64 [B, m]: of a tree, whose nodes see only their
        ancestors among the last m rows, which lie so many positions behind the committed ones; None: rows in a line.
        """
        if self._steps is not None:
            return self._steps.run(tokens, hidden, positions, family, depth)
        slots = self._cache.begin(tokens.shape[1])
        on_device, columns = (slots if positions is None else positions).to(hidden.device), self._cache.key_count
        if family is not None:
            behind = (self._cache.lengths + tokens.shape[1] - family.shape[2]).to(hidden.device)
            mask = visible_tree(behind, family.to(hidden.device), columns, self._window, depth.to(hidden.device))
        else:
            sees_all = tokens.numel() == 1 and self._window is None
            mask = None if sees_all else visible(on_device, columns, self._window)
        rotary = self.draft.rotary(on_device, hidden.dtype)
        return run_layer(self.draft, self._cache, tokens.to(hidden.device), hidden, rotary, mask)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary: hidden [.., H] -> [.., Vd]."""
        return self.draft.head(hidden) if self._steps is None else self._steps.logits(hidden)

    @torch.no_grad()
    def propose(self, k: Tensor, stop: Stop | None = None) -> Proposal:
        committed, hidden = self._cache.lengths, self._hidden

        def logits_after(i: int, last: Tensor | None) -> Tensor:
            nonlocal hidden
            if last is not None:
                hidden = self._run(last[:, None], hidden)
                self._cache.lengths = self._cache.lengths + 1
            return self._logits(hidden[:, 0])

        drafted = draft_chain(k, stop, logits_after, self._ids, self._sampling, self._streams)
        self._cache.lengths = committed
        return drafted

    def keep(self, rows: Sequence[int]) -> None:
        self._cache.keep(rows)
        self._hidden = self._hidden[torch.as_tensor(rows, device=self._hidden.device)]
