"""The one decoding loop: propose, verify in ONE target forward, accept, roll back, repeat. Plain decoding is K = 0 of
it.

Every number of a report comes from here, for every draft and for the baseline alike: same cache, attention, dtype,
counters.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.drafts.base import Proposal, Proposer
from drafttrain.errors import UserError
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling, Streams, greedy_choice, inverse_cdf, warp
from drafttrain.specdec.metrics import Counts
from drafttrain.specdec.verify import verify_chain
from drafttrain.target import Target, TargetStep


class GenerateError(UserError):
    """A prompt or setting that decoding cannot work with."""


@dataclass
class Seconds:
    """Wall-clock seconds by phase. begin: the proposer reading the prompt; rest: outside the target's forward and the
    proposer.
    """

    prefill: float = 0.0
    begin: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0

    @property
    def decode(self) -> float:
        """Everything after the prefill's token."""
        return self.begin + self.draft + self.verify + self.rest

    def add(self, other: "Seconds") -> None:
        """Add another run's seconds to this one's."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Generation:
    """One request's result: tokens (new ones only, a stop token included), finish "stop" or "length", its counts;
    text is set when the target has a tokenizer, cut before a stop string."""

    tokens: list[int]
    finish: str = "length"
    counts: Counts = field(default_factory=Counts)
    text: str | None = None


@dataclass
class Decoded:
    """A batch's results in request order, and the seconds of the whole batch."""

    generations: list[Generation]
    seconds: Seconds

    @property
    def counts(self) -> Counts:
        """Pooled over the requests."""
        total = Counts()
        for generation in self.generations:
            total.add(generation.counts)
        return total


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    proposer: Proposer | None = None,
    *,
    k: int = 4,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    requests: Sequence[int] | None = None,
    observe: Callable[[TargetStep], None] | None = None,
) -> Decoded:
    """Continue each prompt (token ids) by up to max_new_tokens, all as one batch; without a proposer, plain decoding.

    k: drafts a round. stop_ids None takes the target's own, () ignores stops. requests: the indices that seed each
    row's random stream (default 0, 1, ..). observe: called with every TargetStep. Raises GenerateError for an empty
    prompt or k < 1, TargetError when the target's positions do not suffice, SamplingError on NaN logits.
    """
    if proposer is not None and k < 1:
        raise GenerateError(f"k is {k}, expected at least 1 draft a round; leave the proposer out for plain decoding")
    empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
    if empty or not prompts:
        raise GenerateError(f"prompt {empty[0] if empty else 0} is empty, expected at least one token (the BOS, say)")
    if max_new_tokens < 1:
        raise GenerateError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    loop = _Loop(
        target,
        proposer,
        k if proposer is not None else 0,
        sampling or Sampling(),
        max_new_tokens,
        frozenset(target.stop_ids if stop_ids is None else stop_ids),
        tuple(stop_strings),
        observe,
    )
    with torch.no_grad():
        return loop.run([list(prompt) for prompt in prompts], list(requests or range(len(prompts))))


class _Loop:
    def __init__(self, target, proposer, k, sampling, max_new_tokens, stop_ids, stop_strings, observe):
        if stop_strings and target.tokenizer is None:
            raise GenerateError("stop strings need a target with a tokenizer; give stop_ids instead")
        self.target, self.proposer, self.k, self.sampling = target, proposer, k, sampling
        self.max_new_tokens, self.stop_ids, self.stop_strings = max_new_tokens, stop_ids, stop_strings
        self.observe = observe
        self.layers = list(proposer.feature_layers) if proposer is not None else []
        self.seconds = Seconds()
        self._synchronize = torch.cuda.synchronize if target.device.type == "cuda" else None

    def run(self, prompts: list[list[int]], requests: list[int]) -> Decoded:
        generations = [Generation([]) for _ in prompts]
        active = list(range(len(prompts)))
        streams = Streams(self.sampling.seed, requests)
        start = self._now()
        cache, step, next_token = self._prefill(prompts, streams)
        self.seconds.prefill = self._now() - start
        start = self._now()
        if self.proposer is not None:
            self.proposer.begin(step, next_token, self.sampling, streams)
        self.seconds.begin = self._now() - start
        start = self._now()
        for generation, token in zip(generations, next_token.tolist(), strict=True):
            self._deliver(generation, [token])
        while True:
            alive = [row for row, request in enumerate(active) if not self._ended(generations[request])]
            if len(alive) < len(active):
                if not alive:
                    break
                active = [active[row] for row in alive]
                next_token = next_token[alive]
                cache.keep(alive)
                streams.keep(alive)
                if self.proposer is not None:
                    self.proposer.keep(alive)
            next_token = self._iterate(cache, next_token, streams, [generations[i] for i in active])
        self.seconds.rest = self._now() - start - self.seconds.draft - self.seconds.verify
        self._finish(generations)
        return Decoded(generations, self.seconds)

    def _prefill(self, prompts: list[list[int]], streams: Streams) -> tuple[RaggedCache, TargetStep, Tensor]:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        room = min(int(lengths.max()) + self.max_new_tokens + self.k + 1, self.target.max_positions)
        cache = RaggedCache(len(prompts), capacity=room)
        step = self.target.step(tokens, cache, lengths, self.layers, last_only=True)
        cache.lengths = lengths.clone()
        if self.observe is not None:
            self.observe(step)
        uniforms = torch.zeros(len(prompts), 1) if self.sampling.greedy else streams.uniforms([1] * len(prompts), 1)
        return cache, step, self._choose(step.logits[:, 0], uniforms[:, 0])

    def _choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        if self.sampling.greedy:
            return greedy_choice(logits).cpu()
        return inverse_cdf(warp(logits, self.sampling), uniforms.to(logits.device)).cpu()

    def _iterate(self, cache: RaggedCache, last: Tensor, streams: Streams, generations: list[Generation]) -> Tensor:
        """One round for all rows; returns each row's next uncommitted token."""
        room = self.target.max_positions - cache.lengths - 1
        proposal = self._propose(torch.minimum(torch.full_like(room, self.k), room.clamp_min(0)))
        start = self._now()
        tokens = torch.cat([last[:, None], proposal.tokens], 1)
        step = self.target.step(tokens, cache, proposal.lengths + 1, self.layers)
        self.seconds.verify += self._now() - start
        if self.observe is not None:
            self.observe(step)
        width = proposal.tokens.shape[1] + 1
        if self.sampling.greedy:
            uniforms = torch.zeros(len(tokens), width)
        else:
            uniforms = streams.uniforms((proposal.lengths + 1).tolist(), width)
        accepted, next_token = verify_chain(step.logits, proposal, self.sampling, uniforms)
        cache.lengths = cache.lengths + accepted + 1
        for row, generation in enumerate(generations):
            self._account(generation, proposal, row, int(accepted[row]), int(next_token[row]))
        if self.proposer is not None and not all(self._ended(generation) for generation in generations):
            start = self._now()
            nodes = torch.arange(max(int(accepted.max()), 1)).expand(len(tokens), -1)
            self.proposer.advance(step, nodes.masked_fill(nodes >= accepted[:, None], -1), next_token)
            self.seconds.draft += self._now() - start
        return next_token

    def _propose(self, k: Tensor) -> Proposal:
        if self.proposer is None:
            return Proposal(torch.zeros(len(k), 0, dtype=torch.long), torch.zeros_like(k))
        start = self._now()
        proposal = self.proposer.propose(k)
        self.seconds.draft += self._now() - start
        return proposal

    def _account(self, generation: Generation, proposal: Proposal, row: int, accepted: int, next_token: int) -> None:
        """Deliver a row's new tokens and count the round: drafts behind a stop leave both drafted and accepted."""
        drafted = int(proposal.lengths[row])
        new = [*proposal.tokens[row, :accepted].tolist(), next_token]
        taken = self._deliver(generation, new)
        if generation.finish == "stop" and taken <= accepted:
            drafted = accepted = taken
        generation.counts.add_round(drafted, accepted)

    def _deliver(self, generation: Generation, tokens: list[int]) -> int:
        """Append tokens until a stop; returns where the stop fell (1-based), or their number. Cuts at max_new_tokens
        only the text: acceptance stays as verified."""
        for count, token in enumerate(tokens, 1):
            if len(generation.tokens) < self.max_new_tokens:
                generation.tokens.append(token)
                if token in self.stop_ids or (self.stop_strings and self._has_stop_string(generation.tokens)):
                    generation.finish = "stop"
                    return count
        return len(tokens)

    def _has_stop_string(self, tokens: list[int]) -> bool:
        text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in self.stop_strings)

    def _ended(self, generation: Generation) -> bool:
        return generation.finish == "stop" or len(generation.tokens) >= self.max_new_tokens

    def _finish(self, generations: list[Generation]) -> None:
        for generation in generations:
            generation.counts.emitted = len(generation.tokens)
            if self.target.tokenizer is not None:
                text = self.target.tokenizer.decode(generation.tokens, skip_special_tokens=True)
                cuts = [text.index(stop) for stop in self.stop_strings if stop in text]
                generation.text = text[: min(cuts)] if cuts else text

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()
