"""The one decoding loop: propose, verify in ONE target forward, accept, roll back, repeat. Plain decoding is K = 0 of
it.

Every number of a report comes from here, for every draft and for the baseline alike: same cache, attention, dtype,
counters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafts.base import Proposal, Proposer
from drafttrain.errors import UserError
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling, Streams, greedy_choice, inverse_cdf, warp
from drafttrain.nn.tree import deepest, depths
from drafttrain.specdec.clock import Clock
from drafttrain.specdec.graphs import CAPTURED, StaticSteps, capture_note
from drafttrain.specdec.metrics import Counts
from drafttrain.specdec.policy import Policy
from drafttrain.specdec.verify import Synthetic, Typical, verify
from drafttrain.target import Target, TargetStep

CAPTURE = "capture"
"""The phase that no report counts: capturing a step is not decoding."""


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
    text is set when the target has a tokenizer, cut before a stop string.

    seconds: decoding, from the prefill's token until this request's end; deliveries: the tokens of each iteration (the
    prefill's single one first), drafted: how many of them were drafts, gaps: the seconds before each but the first.
    """

    tokens: list[int]
    finish: str = "length"
    counts: Counts = field(default_factory=Counts)
    text: str | None = None
    seconds: float = field(default=0.0, compare=False)
    deliveries: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list, compare=False)


@dataclass
class Decoded:
    """A batch's results in request order, the seconds of the whole batch, and its iterations (`rounds`)."""

    generations: list[Generation]
    seconds: Seconds
    rounds: int = 0

    @property
    def counts(self) -> Counts:
        """Pooled over the requests."""
        total = Counts()
        for generation in self.generations:
            total.add(generation.counts)
        return total


@dataclass(frozen=True)
class _Settings:
    k: int
    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    observe: Callable[[TargetStep], None] | None
    policy: Policy | None
    acceptance: Typical | Synthetic | None
    hold: bool
    capture: bool


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
    policy: Policy | None = None,
    acceptance: Typical | Synthetic | None = None,
    hold: bool = False,
    capture: bool | None = None,
) -> Decoded:
    """Continue each prompt (token ids) by up to max_new_tokens, all as one batch; without a proposer, plain decoding.

    k: drafts a round, or the tree's depth. stop_ids None takes the target's own, () ignores stops. requests: the
    indices that seed each row's random stream (default 0, 1, ..). observe: called with every TargetStep. policy:
    chooses fewer than k drafts (specdec/policy.py). acceptance: None is exact; Typical and Synthetic are lossy. hold:
    rows that have ended stay in the batch uncounted, so that every iteration is as wide as the first. capture: run
    steps over fixed buffers, captured as CUDA graphs where there are any; None: where the target allows it and nobody
    observes (each step overwrites the one before). Raises GenerateError for an empty prompt, k < 1 or deeper than the
    draft goes, or a policy that watches a tree's draft; TargetError when the target's positions do not suffice,
    SamplingError on NaN logits.
    """
    if proposer is not None and k < 1:
        raise GenerateError(f"k is {k}, expected at least 1 draft a round; leave the proposer out for plain decoding")
    if proposer is not None and proposer.max_k is not None and k > proposer.max_k:
        raise GenerateError(f"k is {k}, this draft goes at most {proposer.max_k} tokens deep. Mend: a smaller k")
    empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
    if empty or not prompts:
        raise GenerateError(f"prompt {empty[0] if empty else 0} is empty, expected at least one token (the BOS, say)")
    if max_new_tokens < 1:
        raise GenerateError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if stop_strings and target.tokenizer is None:
        raise GenerateError("stop strings need a target with a tokenizer; give stop_ids instead")
    if proposer is not None and proposer.tree is not None and policy is not None and policy.watches:
        raise GenerateError(
            f"the policy {policy.name} watches a chain's draft, but trees are drafted. Mend: goodput, or no policy"
        )
    note = capture_note(target)
    if capture and note != CAPTURED and target.device.type == "cuda":
        raise GenerateError(f"capture was asked for, but it is {note}. Mend: leave capture out")
    settings = _Settings(
        k if proposer is not None else 0,
        sampling or Sampling(),
        max_new_tokens,
        frozenset(target.stop_ids if stop_ids is None else stop_ids),
        tuple(stop_strings),
        observe,
        policy if proposer is not None else None,
        acceptance,
        hold,
        note == CAPTURED and observe is None if capture is None else capture,
    )
    with torch.no_grad():
        return _Loop(target, proposer, settings).run(
            [list(prompt) for prompt in prompts], list(requests or range(len(prompts)))
        )


class _Loop:
    def __init__(self, target: Target, proposer: Proposer | None, settings: _Settings):
        self.target, self.proposer, self.settings, self.sampling = target, proposer, settings, settings.sampling
        self.layers = list(proposer.feature_layers) if proposer is not None else []
        self.seconds, self.rounds = Seconds(), 0
        self.draws = not self.sampling.greedy or isinstance(settings.acceptance, Synthetic)
        self.static: StaticSteps | None = None

    def run(self, prompts: list[list[int]], requests: list[int]) -> Decoded:
        generations = [Generation([]) for _ in prompts]
        active = list(range(len(prompts)))
        streams = Streams(self.sampling.seed, requests)
        cache = self._cache(prompts)
        self.clock = Clock(self.target.device, self.target.spread)
        step, next_token = self._prefill(prompts, cache, streams)
        self.clock.mark("prefill")
        if self.proposer is not None:
            self.proposer.begin(step, next_token, self.sampling, streams)
        self.clock.mark("begin")
        del step
        for generation, token in zip(generations, next_token.tolist(), strict=True):
            self._deliver(generation, [token])
        self.clock.mark("rest")
        begin = self._charge()
        while True:
            alive = [row for row, request in enumerate(active) if self._stays(generations[request], cache, row)]
            if all(self._ended(generation) for generation in generations):
                break
            if len(alive) < len(active):
                active = [active[row] for row in alive]
                next_token = next_token[alive]
                cache.keep(alive)
                streams.keep(alive)
                if self.proposer is not None:
                    self.proposer.keep(alive)
            rows = [generations[i] for i in active]
            counted = [generation for generation in rows if not self._ended(generation)]
            next_token = self._iterate(cache, next_token, streams, rows)
            self.clock.mark("rest")
            elapsed = self._charge()
            for generation in counted:
                generation.seconds += elapsed + begin
                generation.gaps.append(elapsed + begin)
            self.rounds, begin = self.rounds + 1, 0.0
        self._finish(generations)
        return Decoded(generations, self.seconds, self.rounds)

    def _charge(self) -> float:
        """Add what the clock has to the phases; returns the decoding seconds among it."""
        elapsed = 0.0
        for phase, seconds in self.clock.read():
            if phase == CAPTURE:
                continue
            setattr(self.seconds, phase, getattr(self.seconds, phase) + seconds)
            elapsed += seconds if phase != "prefill" else 0.0
        return elapsed

    def _stays(self, generation: Generation, cache: RaggedCache, row: int) -> bool:
        if not self._ended(generation):
            return True
        # A held row leaves when it runs out of positions.
        return self.settings.hold and int(cache.lengths[row]) + self.settings.k + 2 < self.target.max_positions

    def _cache(self, prompts: list[list[int]]) -> RaggedCache:
        """For all that is to come; with captured steps the one they work on."""
        room = max(map(len, prompts)) + self.settings.max_new_tokens + self._most_nodes() + 1
        if not self.settings.capture:
            return RaggedCache(len(prompts), capacity=room)
        room += self.settings.max_new_tokens * self.settings.hold  # Held rows may run on as far again.
        self.static = StaticSteps.of(self.target, len(prompts))
        if self.proposer is not None:
            self.proposer.reserve(len(prompts), room, self.settings.k)
        return self.static.begin(room)

    def _prefill(self, prompts: list[list[int]], cache: RaggedCache, streams: Streams) -> tuple[TargetStep, Tensor]:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        step = self.target.step(tokens, cache, lengths, self.layers, last_only=True)
        cache.lengths = lengths.clone()
        if self.settings.observe is not None:
            self.settings.observe(step)
        uniforms = streams.uniforms([1] * len(prompts), 1) if self.draws else torch.zeros(len(prompts), 1)
        return step, self._choose(step.logits[:, 0], uniforms[:, 0])

    def _most_nodes(self) -> int:
        """Drafts that one round can hold."""
        tree = self.proposer.tree if self.proposer is not None else None
        return self.settings.k if tree is None else tree.count(self.settings.k)

    def _step(self, tokens: Tensor, cache: RaggedCache, proposal: Proposal) -> TargetStep:
        """The target's forward over the last tokens and the drafts."""
        lengths, parents = proposal.lengths + 1, proposal.parents
        if self.static is None:
            return self.target.step(tokens, cache, lengths, self.layers, parents=parents)
        width = tokens.shape[1] if parents is None else self._most_nodes() + 1
        if self.static.prepare(width, self.layers, parents is not None):
            self.clock.mark(CAPTURE)
        return self.static.step(tokens, cache, lengths, self.layers, parents, width)

    def _choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        if self.sampling.greedy:
            return greedy_choice(logits).cpu()
        return inverse_cdf(warp(logits, self.sampling), uniforms.to(logits.device)).cpu()

    def _iterate(self, cache: RaggedCache, last: Tensor, streams: Streams, generations: list[Generation]) -> Tensor:
        """One round for all rows; returns each row's next uncommitted token."""
        self.clock.mark("rest")
        proposal = self._propose(self.target.max_positions - cache.lengths - 1)
        tokens = torch.cat([last[:, None], proposal.tokens], 1)
        step = self._step(tokens, cache, proposal)
        self.clock.mark("verify")
        if self.settings.observe is not None:
            self.settings.observe(step)
        width = proposal.tokens.shape[1] + 1
        if self.draws:
            uniforms = streams.uniforms((proposal.lengths + 1).tolist(), width)
        else:
            uniforms = torch.zeros(len(tokens), width)
        path, next_token = verify(step.logits, proposal, self.sampling, uniforms, self.settings.acceptance)
        accepted = (path >= 0).sum(1)
        if proposal.parents is not None:
            (self.static or cache).gather(F.pad(torch.where(path < 0, -1, path + 1), (1, 0)))
        cache.lengths = cache.lengths + accepted + 1
        depth = None if proposal.parents is None else _depths(proposal)
        for row, generation in enumerate(generations):
            if not self._ended(generation):
                drafts = proposal.tokens[row, path[row, : int(accepted[row])]].tolist()
                self._account(
                    generation, [*drafts, int(next_token[row])], int(proposal.lengths[row]), depth and depth[row]
                )
        if self.settings.policy is not None:
            self.settings.policy.observe(proposal.lengths if depth is None else torch.tensor(depth), accepted)
        if self.proposer is not None and not all(self._ended(generation) for generation in generations):
            self.clock.mark("rest")
            self.proposer.advance(step, path, next_token)
            self.clock.mark("draft")
        return next_token

    def _propose(self, room: Tensor) -> Proposal:
        k = torch.minimum(torch.full_like(room, self.settings.k), room.clamp_min(0))
        if self.proposer is None:
            return Proposal(torch.zeros(len(k), 0, dtype=torch.long), k)
        policy = self.settings.policy
        if policy is None:
            proposal = self.proposer.propose(k)
        else:
            proposal = self.proposer.propose(policy.limit(k), policy.stop if policy.watches else None)
        self.clock.mark("draft")
        return proposal

    def _account(self, generation: Generation, new: list[int], drafted: int, depth: int | None) -> None:
        """Deliver a row's new tokens and count the round: drafts behind a stop leave both drafted and accepted."""
        accepted = len(new) - 1
        taken = self._deliver(generation, new)
        if generation.finish == "stop" and taken <= accepted:
            accepted = taken
            drafted = taken if depth is None else drafted
        generation.counts.add_round(drafted, accepted, depth)

    def _deliver(self, generation: Generation, tokens: list[int]) -> int:
        """Append tokens until a stop; returns where the stop fell (1-based), or their number. Cuts at max_new_tokens
        only the text: acceptance stays as verified."""
        before = len(generation.tokens)
        place = len(tokens)
        for count, token in enumerate(tokens, 1):
            if len(generation.tokens) < self.settings.max_new_tokens:
                generation.tokens.append(token)
                if token in self.settings.stop_ids or self._has_stop_string(generation.tokens):
                    generation.finish, place = "stop", count
                    break
        generation.deliveries.append(len(generation.tokens) - before)
        generation.drafted.append(min(generation.deliveries[-1], len(tokens) - 1))
        return place

    def _has_stop_string(self, tokens: list[int]) -> bool:
        if not self.settings.stop_strings:
            return False
        text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in self.settings.stop_strings)

    def _ended(self, generation: Generation) -> bool:
        return generation.finish == "stop" or len(generation.tokens) >= self.settings.max_new_tokens

    def _finish(self, generations: list[Generation]) -> None:
        for generation in generations:
            generation.counts.emitted = len(generation.tokens)
            if self.target.tokenizer is not None:
                text = self.target.tokenizer.decode(generation.tokens, skip_special_tokens=True)
                cuts = [text.index(stop) for stop in self.settings.stop_strings if stop in text]
                generation.text = text[: min(cuts)] if cuts else text


def _depths(proposal: Proposal) -> list[int]:
    """Depth of each row's tree."""
    deep = depths(proposal.parents)
    return deepest(deep, proposal.lengths).tolist() if deep.shape[1] else [0] * len(deep)
