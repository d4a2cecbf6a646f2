"""How often each Medusa head's likeliest words are the target's choice, over teacher-forced texts: what a static tree
is grown from (arXiv 2401.10774, section 2.3.3).

The target's choices and, for sequential heads, the tokens between are those of the text: branches that leave it are
taken to fare like it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.drafts.base import Batch, supervised_rows
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.nn.teacher import argmax
from drafttrain.nn.tree import StaticTree, TreeError

WIDTH = 10
"""Ranks that are told apart, and so the most siblings of a tree."""
ROWS = 4096
"""Rows that are enough: a share of one half is then known to .008."""
CHUNK = 256
"""Rows whose logits over the whole vocabulary exist at once."""


@dataclass
class Ranks:
    """Where the target's choice stands among a head's words, at each step (head) i of each row p of some texts.

    rank int64 [K, n]: from 0, `width` where it is not among the `width` likeliest; counts bool [K, n]: whether the row
    counts at that step (drafts.base.supervised_rows); follows bool [K, n]: whether the text goes on with the choice.
    """

    rank: Tensor
    counts: Tensor
    follows: Tensor
    width: int


@torch.no_grad()
def measure_ranks(
    draft: MedusaDraft,
    batches: Iterable[Batch],
    width: int = WIDTH,
    most: int = ROWS,
    progress: Callable[[int], None] | None = None,
) -> Ranks:
    """The ranks over batches with last_hidden (and target_argmax, for a smaller draft vocabulary) attached, on the
    draft's device; no more batches are taken than `most` rows need. progress: told the rows done.

    Raises TreeError where no row counts: every answer is shorter than two tokens.
    """
    width, parts, done = min(width, draft.draft_vocab_size), [], 0
    for batch in batches:
        part = _ranks_of(draft, batch, width, most - done)
        parts.append(part)
        done += part.rank.shape[1]
        if progress is not None:
            progress(done)
        if done >= most:
            break
    if not done:
        raise TreeError(
            "no place of the validation texts counts, so no tree can be grown; expected answers of two tokens or more. "
            "Mend: other data.validation, or draft.tree_nodes: 0 for no tree"
        )
    rank, counts, follows = (torch.cat([getattr(p, name) for p in parts], 1) for name in ("rank", "counts", "follows"))
    return Ranks(rank, counts, follows, width)


def _ranks_of(draft: MedusaDraft, batch: Batch, width: int, most: int) -> Ranks:
    """Of one batch's first `most` rows."""
    valid = supervised_rows(batch.loss_mask.bool(), draft.steps)
    row, place = (found[:most] for found in valid[0].nonzero(as_tuple=True))
    counts = valid[:, row, place]
    normed, choice = draft.teacher.normed(batch.last_hidden), _choices(draft, batch, valid)
    rank = torch.full_like(counts, width, dtype=torch.long)
    follows = torch.zeros_like(counts)
    for i in range(draft.steps):
        for chosen in counts[i].nonzero()[:, 0].split(CHUNK):
            b, p = row[chosen], place[chosen]
            between = None
            if draft.shape.sequential:
                between = draft.embed(
                    batch.input_ids[b[:, None], p[:, None] + 1 + torch.arange(i + 1, device=p.device)]
                )
            logits = draft.logits(i, draft.state(i, normed[b, p], between))
            words = draft.draft_ids[logits.topk(width, -1).indices]
            target = choice[b, p + 1 + i]
            found = words == target[:, None]
            rank[i, chosen] = torch.where(found.any(1), found.long().argmax(1), width)
            follows[i, chosen] = batch.input_ids[b, p + 2 + i] == target
    return Ranks(rank.cpu(), counts.cpu(), follows.cpu(), width)


def _choices(draft: MedusaDraft, batch: Batch, valid: Tensor) -> Tensor:
    """int64 [B, T]: the target's choice after each position that a row which counts (valid bool [K, B, T]) looks at."""
    if batch.target_argmax is not None:
        return batch.target_argmax
    assert draft.whole_vocabulary, "the target's choice is not attached"
    needed = torch.zeros_like(valid[0])
    for i, rows in enumerate(valid):
        needed[:, 1 + i :] |= rows[:, : rows.shape[1] - 1 - i]
    choice = torch.zeros_like(batch.input_ids)
    hidden = batch.last_hidden[needed]
    choice[needed] = torch.cat([argmax(draft.teacher(part)) for part in hidden.split(CHUNK)])
    return choice


def hit_table(ranks: Ranks) -> list[list[float]]:
    """hits[i][r], [K][width]: the share of rows whose target choice at step i has rank r, of the rows that count there
    and are still on a path: at all earlier steps the choice was among the `width` likeliest, and the text took it.

    Conditional, unlike the paper's: where one head is right the next one is more often right than elsewhere, so the
    product of unconditional shares is too low for deep nodes. Row i is 0 where no text got so far.
    """
    on = torch.ones_like(ranks.counts[0])
    table = []
    for rank, counts, follows in zip(ranks.rank, ranks.counts, ranks.follows, strict=True):
        on = on & counts
        found = torch.bincount(rank[on], minlength=ranks.width + 1)[: ranks.width]
        table.append((found.double() / max(int(on.sum()), 1)).tolist())
        on = on & (rank < ranks.width) & follows
    return table


def replay(tree: StaticTree, ranks: Ranks) -> float:
    """tau of the tree on these very rows: 1 + the sum over depths of how often the choices down to there are nodes of
    it. A row that stops counting, or whose text leaves the choices, is left out from there on (Kaplan and Meier 1958).
    """
    child = torch.full((tree.nodes + 1, ranks.width + 1), -1)
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True), 1):
        child[parent + 1, rank] = node
    at = torch.zeros_like(ranks.rank[0])
    on, share, tau = torch.ones_like(ranks.counts[0]), 1.0, 1.0
    for i in range(tree.depth):
        on = on & ranks.counts[i]
        at = child[at.clamp_min(0), ranks.rank[i]]
        reached = on & (at >= 0)
        share *= int(reached.sum()) / max(int(on.sum()), 1)
        tau += share
        on = reached & ranks.follows[i]
    return tau
