"""EAGLE-3 drafting of trees: static ones, and EAGLE-2's dynamic ones (arXiv 2406.16858, section 4).

The draft runs once a level over the nodes that get children; among themselves the nodes see only their ancestors.
"""

import torch
from torch import Tensor

from drafttrain.drafts.base import DraftError, Proposal, Stop
from drafttrain.drafts.eagle3_proposer import Eagle3Proposer
from drafttrain.drafts.static_tree import check_width, draft_static_tree
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.nn.tree import DynamicTree, Tree
from drafttrain.target import TargetStep


class Eagle3TreeProposer(Eagle3Proposer):
    """Proposes trees; k is the depth. Policies that watch the draft's confidence do not apply: the tree does that."""

    def __init__(self, draft, tree: Tree):
        super().__init__(draft)
        self.tree, self.max_k = tree, None if isinstance(tree, DynamicTree) else tree.depth
        if not isinstance(tree, DynamicTree):
            check_width(tree, len(self._ids))

    def reserve(self, batch: int, room: int, k: int) -> None:
        """As in Proposer; the tree's own rows need room too, beyond what the target verifies."""
        inner = self.tree.topk * (k - 1) if isinstance(self.tree, DynamicTree) else self.tree.nodes
        super().reserve(batch, room + inner + k + 1, k)

    def begin(self, step: TargetStep, next_token: Tensor, sampling: Sampling, streams: Streams) -> None:
        if sampling.draws_drafts and isinstance(self.tree, DynamicTree):
            raise DraftError(
                "a dynamic tree was asked for with probabilistic drafts. Its children are chosen by their probability, "
                "which is exact only for drafts that are not drawn. Mend: draft_mode one_hot, or a static tree."
            )
        super().begin(step, next_token, sampling, streams)

    @torch.no_grad()
    def propose(self, k: Tensor, stop: Stop | None = None) -> Proposal:
        committed, self._depth = self._cache.lengths, torch.zeros(0, dtype=torch.long)
        if not int(k.max()):
            return Proposal(torch.zeros(len(k), 0, dtype=torch.long), torch.zeros_like(k))
        drafted = self._dynamic(k) if isinstance(self.tree, DynamicTree) else self._static(k)
        self._cache.lengths = committed
        return drafted

    def _expand(self, tokens: Tensor, hidden: Tensor, level: int, committed: Tensor, family: Tensor) -> Tensor:
        """Run the nodes [B, n] of a level that get children: their parents' hidden [B, n, H] -> their own."""
        positions = (committed + level - 1)[:, None].expand(tokens.shape)
        self._depth = torch.cat([self._depth, torch.full((tokens.shape[1],), level - 1)])
        hidden = self._run(tokens, hidden, positions, family, self._depth.expand(len(tokens), -1))
        self._cache.lengths = self._cache.lengths + tokens.shape[1]
        return hidden

    def _dynamic(self, k: Tensor) -> Proposal:
        B, K, width = len(k), int(k.max()), min(self.tree.topk, len(self._ids))
        rows = torch.arange(B, device=self._hidden.device)[:, None]
        committed, hidden = self._cache.lengths, self._hidden
        scores, choice = self._logits(hidden[:, 0]).float().log_softmax(-1).topk(width, -1)
        tokens, values, parents = [self._ids[choice]], [scores], [torch.full_like(choice, -1)]
        frontier, offset = torch.arange(width, device=rows.device).expand(B, width), 0
        hidden = hidden.expand(-1, width, -1)
        family = torch.eye(width, dtype=torch.bool, device=rows.device).repeat(B, 1, 1)
        for level in range(1, K):
            here = tokens[-1].gather(1, frontier)
            states = self._expand(here.cpu(), hidden, level, committed, family)
            best, choice = self._logits(states).float().log_softmax(-1).topk(width, -1)
            total = (best + values[-1].gather(1, frontier)[..., None]).flatten(1)
            tokens.append(self._ids[choice].flatten(1))
            parents.append((offset + frontier)[..., None].expand(-1, -1, width).flatten(1))
            values.append(total)
            offset += tokens[-2].shape[1]
            frontier = total.topk(width, -1).indices.sort(-1).values  # Breadth-first order holds all the way down.
            origin = frontier // width  # The row of this level's run that each new frontier node hangs on.
            hidden = states[rows, origin]
            own = torch.eye(width, dtype=torch.bool, device=rows.device).expand(B, -1, -1)
            family = torch.cat([family[rows, origin], own], 2)
        return self._rerank(torch.cat(tokens, 1), torch.cat(values, 1), torch.cat(parents, 1), k, width)

    def _rerank(self, tokens: Tensor, values: Tensor, parents: Tensor, k: Tensor, width: int) -> Proposal:
        """Of all nodes [B, M], in breadth-first order, those that are verified."""
        tokens, values, parents = tokens.cpu(), values.cpu(), parents.cpu()
        M = tokens.shape[1]
        depth = torch.cat([torch.ones(width, dtype=torch.long), 2 + torch.arange(M - width) // width**2])
        values = values.masked_fill(depth > k[:, None], -torch.inf)
        # A stable sort over breadth-first order: among equals the shallower, so a node never comes without its parent.
        order = values.sort(dim=1, descending=True, stable=True).indices[:, : self.tree.nodes]
        lengths = torch.minimum((depth <= k[:, None]).sum(1), torch.tensor(order.shape[1]))
        order = order.masked_fill(torch.arange(order.shape[1]) >= lengths[:, None], M).sort(1).values
        inside = order.clamp_max(M - 1)
        above = parents.gather(1, inside)
        index = torch.searchsorted(order, above).masked_fill(above < 0, -1).masked_fill(order == M, -1)
        return Proposal(tokens.gather(1, inside), lengths, index)

    def _static(self, k: Tensor) -> Proposal:
        tree, committed = self.tree, self._cache.lengths
        states = {-1: self._hidden[:, 0]}
        run_rows: list[int] = []

        def logits_of(level: int, parents: list[int], tokens: Tensor) -> Tensor:
            if level:
                family = self._family(parents, run_rows).to(tokens.device).expand(len(k), -1, -1)
                hidden = torch.stack([states[tree.parents[i]] for i in parents], 1)
                out = self._expand(tokens[:, parents].cpu(), hidden, level, committed, family)
                states.update((node, out[:, j]) for j, node in enumerate(parents))
                run_rows.extend(parents)
            return self._logits(torch.stack([states[parent] for parent in parents], 1))

        return draft_static_tree(tree, k, logits_of, self._ids, self._sampling, self._streams)

    def _family(self, nodes: list[int], run_rows: list[int]) -> Tensor:
        """Who sees whom, bool [1, n, m]: nodes to run against all rows run before and with them."""
        columns = [*run_rows, *nodes]
        seen = torch.zeros(1, len(nodes), len(columns), dtype=torch.bool)
        for i, node in enumerate(nodes):
            seen[0, i, [columns.index(own) for own in self.tree.lineage(node)]] = True
        return seen
