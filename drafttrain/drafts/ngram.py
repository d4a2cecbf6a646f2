"""Prompt lookup: the tokens that followed the longest, most recent earlier match of the last tokens. A Proposer
without a model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.drafts.base import Proposal, Proposer, Stop
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.target import TargetStep


class NgramProposer(Proposer):
    """Drafts what followed the longest suffix of max_n..min_n tokens seen before; nothing where there is no match.

    The names in vLLM: prompt_lookup_min = min_n, prompt_lookup_max = max_n. An index from n-gram to its latest start
    is kept, so a round costs O(max_n) whatever the length of the text.
    """

    def __init__(self, min_n: int = 2, max_n: int = 5):
        assert 1 <= min_n <= max_n
        self.min_n, self.max_n = min_n, max_n
        self._texts: list[list[int]] = []
        self._next: list[dict[tuple[int, ...], int]] = []

    def begin(self, step: TargetStep, next_token: Tensor, sampling: Sampling, streams: Streams) -> None:
        self._texts, self._next = [], []
        for row, length in zip(step.tokens.tolist(), step.lengths.tolist(), strict=True):
            self._texts.append([])
            self._next.append({})
            self._extend(len(self._texts) - 1, row[:length])
        for row, token in enumerate(next_token.tolist()):
            self._extend(row, [token])

    def _extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram enters the index when a token follows it, so the current suffix never matches
        itself.
        """
        text, following = self._texts[row], self._next[row]
        for token in tokens:
            for n in range(self.min_n, min(self.max_n, len(text)) + 1):
                following[tuple(text[-n:])] = len(text)
            text.append(token)

    def propose(self, k: Tensor, stop: Stop | None = None) -> Proposal:
        drafts = [self._lookup(row, limit) for row, limit in enumerate(k.tolist())]
        lengths = torch.tensor([len(d) for d in drafts])
        tokens = torch.zeros(len(drafts), max(int(lengths.max()), 0), dtype=torch.long)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        return Proposal(tokens, lengths)

    def _lookup(self, row: int, limit: int) -> list[int]:
        text = self._texts[row]
        for n in range(min(self.max_n, len(text)), self.min_n - 1, -1):
            start = self._next[row].get(tuple(text[-n:]))
            if start is not None:
                return text[start : start + limit]
        return []

    def advance(self, step: TargetStep, path: Tensor, next_token: Tensor) -> None:
        accepted = (path >= 0).sum(1).tolist()
        for row, (count, token) in enumerate(zip(accepted, next_token.tolist(), strict=True)):
            nodes = path[row, :count].tolist()
            self._extend(row, [int(step.tokens[row, node + 1]) for node in nodes] + [token])

    def keep(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._next = [self._next[row] for row in rows]
