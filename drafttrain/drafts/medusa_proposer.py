"""Drafting with Medusa heads: no cache, all from the target's last hidden state in front of the newest token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.drafts.base import Proposal, Proposer, Stop, draft_chain
from drafttrain.drafts.static_tree import check_width, draft_static_tree
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.nn.tree import StaticTree
from drafttrain.target import TargetStep


class MedusaProposer(Proposer):
    """Head i drafts the token i + 1 places behind the newest one. In a tree all nodes of a depth get the same head's
    words as children, unless the heads are sequential and read the path.
    """

    def __init__(self, draft, tree: StaticTree | None = None):
        self.draft, self.tree = draft.eval(), tree
        self.max_k = draft.max_k if tree is None else tree.depth
        if tree is not None:
            check_width(tree, draft.draft_vocab_size)

    @torch.no_grad()
    def begin(self, step: TargetStep, next_token: Tensor, sampling: Sampling, streams: Streams) -> None:
        self._sampling, self._streams = sampling, streams
        self._read(step, step.lengths - 1, next_token)

    @torch.no_grad()
    def advance(self, step: TargetStep, path: Tensor, next_token: Tensor) -> None:
        # The column of the last accepted node; the root, column 0, where none was.
        depth = (path >= 0).sum(1, keepdim=True)
        columns = torch.cat([torch.full((len(path), 1), -1), path], 1).gather(1, depth)[:, 0] + 1
        self._read(step, columns, next_token)

    def _read(self, step: TargetStep, columns: Tensor, next_token: Tensor) -> None:
        rows = torch.arange(len(columns))
        self._normed = self.draft.teacher.normed(step.last_hidden[rows, columns])
        self._next = next_token

    def _embed(self, tokens: Tensor) -> Tensor | None:
        """Of sequential heads: the newest token and the path behind it, int64 [.., n] -> [.., n, H]."""
        return self.draft.embed(tokens.to(self._normed.device)) if self.draft.shape.sequential else None

    @torch.no_grad()
    def propose(self, k: Tensor, stop: Stop | None = None) -> Proposal:
        if self.tree is not None:
            return self._tree(k)
        path = [self._next]

        def logits_after(i: int, last: Tensor | None) -> Tensor:
            if last is not None:
                path.append(last)
            return self.draft.logits(i, self.draft.state(i, self._normed, self._embed(torch.stack(path, -1))))

        return draft_chain(k, stop, logits_after, self.draft.draft_ids, self._sampling, self._streams)

    def _tree(self, k: Tensor) -> Proposal:
        tree, draft = self.tree, self.draft

        def logits_of(level: int, parents: list[int], tokens: Tensor) -> Tensor:
            n = len(parents)
            if not draft.shape.sequential:
                return draft.logits(level, draft.state(level, self._normed, None))[:, None].expand(-1, n, -1)
            paths = torch.tensor([tree.lineage(parent) for parent in parents], dtype=torch.long).view(n, level)
            first = self._next.to(tokens.device)[:, None, None].expand(-1, n, 1)
            between = self._embed(torch.cat([first, tokens[:, paths.to(tokens.device)]], -1))
            normed = self._normed[:, None].expand(-1, n, -1)
            return draft.logits(level, draft.state(level, normed, between))

        return draft_static_tree(tree, k, logits_of, draft.draft_ids, self._sampling, self._streams)

    def keep(self, rows: Sequence[int]) -> None:
        index = torch.as_tensor(rows, dtype=torch.long)
        self._normed, self._next = self._normed[index.to(self._normed.device)], self._next[index]
