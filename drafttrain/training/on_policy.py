"""On-policy distillation (GKD, arXiv 2306.13649; DistillSpec, arXiv 2310.08461): a share of the training batches is
continued by the draft itself, for the target to score what the draft would really say.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from drafttrain.data.batching import collate
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import OnPolicyConfig
from drafttrain.specdec.decode import generate
from drafttrain.target import Target

LEAST = 2
"""Tokens that a continuation needs for its first trained row, and a prompt to be one."""


class Writer(Protocol):
    """A draft that can write on its own."""

    def small_target(self) -> Target:
        """A frozen model with the draft's weights of now, over the target's vocabulary."""


class OnPolicy:
    """Replaces a share of the micro-batches with the draft's own continuations of their prompts.

    seed: the run's. stop_ids: the tokens that end a continuation, themselves included in it. max_positions: the
    longest row that the target and the draft can read. Every draw comes from (seed, step, place of the micro-batch in
    the step, over all processes), none from torch's global state, so a resumed run trains on the same batches, with
    another number of processes too; only where `start` meets a budget in
    minutes does it hang on the clock. The draft writes with its whole head, also where drafts are a smaller vocabulary.
    """

    def __init__(self, settings: OnPolicyConfig, seed: int, stop_ids: Sequence[int], max_positions: int):
        self.settings, self.seed = settings, seed
        self.stop_ids, self.max_positions = tuple(stop_ids), max_positions

    def replace(
        self,
        inputs: Sequence[dict[str, Tensor]],
        draft: Writer,
        progress: float,
        step: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> list[dict[str, Tensor]]:
        """The micro-batches of one optimizer step, each as it is or replaced.

        inputs: of `data.batching.collate`; progress: of the training, 0 to 1. A replaced batch is collated too, on the
        same device: index -1 for every row, loss_mask true on the continuation alone. A batch of which no row could be
        continued by two tokens (the first token was a stop, no positions left) is returned as it is.
        """
        out, small = [], None
        for i, batch in enumerate(inputs):
            rng = random.Random(f"{self.seed}:{step}:{rank + i * world_size}")
            if progress < self.settings.start or rng.random() >= self.settings.share:
                out.append(batch)
                continue
            small = draft.small_target() if small is None else small
            rows = self._continue(batch, small, rng)
            device = batch["input_ids"].device
            out.append({name: tensor.to(device) for name, tensor in collate(rows).items()} if rows else batch)
        return out

    def _continue(self, batch: dict[str, Tensor], small: Target, rng: random.Random) -> list[dict]:
        """The batch's prompts with what the model writes behind them, as rows for collate."""
        positions = min(self.max_positions, small.max_positions)
        prompts = self._choose(_prompts(batch, rng), batch["input_ids"].numel(), positions, rng)
        new = min(self.settings.max_new_tokens, positions - max(map(len, prompts), default=positions))
        if new < LEAST:
            return []
        s = self.settings
        # Not captured as CUDA graphs: the batch's size changes from call to call, and each size would hold memory.
        decoded = generate(
            small,
            prompts,
            sampling=Sampling(s.temperature, s.top_p, s.top_k, rng.getrandbits(63)),
            max_new_tokens=new,
            stop_ids=self.stop_ids,
            capture=False,
        )
        rows = []
        for prompt, generation in zip(prompts, decoded.generations, strict=True):
            if len(generation.tokens) >= LEAST:
                mask = [0] * len(prompt) + [1] * len(generation.tokens)
                rows.append({"index": -1, "input_ids": prompt + generation.tokens, "loss_mask": mask})
        return rows

    def _choose(self, prompts: list[list[int]], size: int, positions: int, rng: random.Random) -> list[list[int]]:
        """Prompts with room behind them, as many, drawn at random, as keep rows x width within size + max_new_tokens.

        Rows are left out only where continuations are longer than the text they stand for: the batch would outgrow the
        token budget.
        """
        new, longest, chosen = self.settings.max_new_tokens, 0, []
        for i in rng.sample(range(len(prompts)), len(prompts)):
            wider = max(longest, len(prompts[i]))
            fits = (len(chosen) + 1) * min(wider + new, positions) <= size + new
            if fits and len(prompts[i]) + LEAST <= positions:
                chosen.append(i)
                longest = wider
        return [prompts[i] for i in sorted(chosen)]


def _prompts(batch: dict[str, Tensor], rng: random.Random) -> list[list[int]]:
    """What comes before the place where each row is cut; rows without a supervised token have none."""
    rows = zip(batch["input_ids"].tolist(), batch["loss_mask"].tolist(), strict=True)
    return [ids[: cut(mask, rng)] for ids, mask in rows if any(mask)]


def cut(mask: Sequence[bool], rng: random.Random) -> int:
    """Where the draft takes over: at the first token of a supervised stretch, drawn at random where there are several.

    Plain text, supervised from its first or second token on, is cut between a quarter and three quarters of its length.
    """
    starts = [i + 1 for i, (before, here) in enumerate(pairwise(mask)) if here and not before and i + 1 >= LEAST]
    if starts:
        return rng.choice(starts)
    end = max(i for i, supervised in enumerate(mask) if supervised) + 1
    low = min(end, max(LEAST, -(-end // 4)))
    return rng.randint(low, max(low, 3 * end // 4))
