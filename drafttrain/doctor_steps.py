"""Checks of drafting against training: from step 1 to step k, and proposals against training-time logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.doctor_case import Case, Problem, Result, Unmeasured, verdict
from drafttrain.doctor_words import Texts, hits_of, logits_of, percent, step_states
from drafttrain.drafts.base import Draft, DraftError
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.loading import load_draft
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.target import Target, TargetStep

LOOP_SHARE = 0.85
"""The loop must accept as many drafts as the same texts allow teacher-forced; in fp32 it is the same number, in
bfloat16 a few ties fall otherwise.
"""
FALL, ENOUGH = 0.6, 30
"""Conditional acceptance of a later step against the first: a draft that was unrolled in training keeps it up, since
what reaches step k is easy text (0.55, 0.72, 0.57 on a real run); one that was not falls to a third. Rows of the step
before that a rate needs.
"""
MOST_VARIATION = 0.1
"""Mean total variation between proposal and training-time distribution: it is the acceptance that is lost. bfloat16
against fp32 masters gives 0.01 to 0.03, a wrong position or layer above 0.3.
"""
PARITY_TEXTS, ROUNDS = 4, (2, 0, 0)
AGAIN = "export the draft again; where that does not help, report it with this output"


# steps


def steps(case: Case) -> Result:
    """The fall of acceptance from step 1 to step k, in the loop and teacher-forced on the same texts.

    Two faults: the loop accepts less than LOOP_SHARE of what a replay of the texts gives (positions or caching while
    serving), or, of EAGLE-3, which runs on its own outputs, step k hits less than FALL of step 1 given the steps before
    (too few TTT steps, or wrong positions in training). Medusa's later heads are weaker by nature.
    """
    draft, texts, k = case.draft, case.texts, case.k
    hits, valid = hits_of(draft, texts, k), texts.valid(k)
    joint = torch.stack([hits[: i + 1].all(0) & valid[i] for i in range(k)])
    before = [int(valid[0].sum()), *(int((joint[i - 1] & valid[i]).sum()) for i in range(1, k))]
    forced = [int(joint[i].sum()) / rows if rows else None for i, rows in enumerate(before)]
    loop, replayed = _counts(case, hits)
    problems: list[Problem] = []
    if sum(loop) < LOOP_SHARE * sum(replayed):
        found = f"the loop accepts {sum(loop)} drafts where the same texts, teacher-forced, give {sum(replayed)}"
        problems.append((f"{found}: positions or caching differ between training and serving", AGAIN))
    if isinstance(draft, Eagle3Draft):
        problems += _falls(case, forced, before)
    if not problems and not sum(loop) and not joint.any():
        raise Unmeasured("no draft was right, in the loop or teacher-forced: train longer, or give more --samples")
    rates = case.answers.drafted.counts.conditional_acceptance
    evidence = [
        f"conditional acceptance, teacher-forced: {_line(forced)}; in the loop: {_line(rates)}",
        f"accepted in the loop {sum(loop)}, by replay {sum(replayed)}, over {len(loop)} of {len(case.prompts)} answers "
        "that are the same with and without the draft (others part at ties of the dtype)",
    ]
    return verdict(problems, evidence, teacher_forced=forced, loop=rates, accepted=sum(loop), replayed=sum(replayed))


def _line(rates: Sequence[float | None]) -> str:
    return " ".join("-" if rate is None else f"{rate:.2f}" for rate in rates)


def _falls(case: Case, forced: Sequence[float | None], rows: Sequence[int]) -> Iterator[Problem]:
    trained = case.recipe.training.ttt_steps if case.recipe else None
    for i in range(1, len(forced)):
        if rows[i] < ENOUGH or forced[0] is None or forced[i] >= FALL * forced[0]:
            continue
        found = f"step {i + 1} hits {percent(forced[i])} given the steps before, step 1 {percent(forced[0])}"
        if trained is not None and i + 1 > trained:
            yield (
                f"{found}; training unrolled {trained} steps",
                f"training.ttt_steps: {len(forced)}, or draft at most {trained} (--k)",
            )
        else:
            mend = "train with ttt_steps at least as deep as is drafted; positions of step k are p + k"
            yield f"{found}, although training unrolled that far" if trained else found, mend
        return


def _counts(case: Case, hits: Tensor) -> tuple[list[int], list[int]]:
    """Accepted drafts of each prompt in the loop, and by a replay of its known text; where both texts are the same."""
    loop, replayed = [], []
    for row, (prompt, plain, drafted) in enumerate(case.answers.pairs()):
        if drafted.tokens != plain.tokens:  # A tie in bfloat16.
            continue
        loop.append(drafted.counts.accepted)
        replayed.append(replay(hits[:, row], len(prompt.ids), len(plain.tokens), len(hits)))
    return loop, replayed


def replay(hits: Tensor, prompt: int, count: int, k: int) -> int:
    """Drafts that the loop accepts on a known text of `count` new tokens: hits bool [k, T] of its rows. Row p drafts
    behind x[p+1]; the first token comes with the prefill. Drafts beyond the end are not counted.
    """
    at, total = prompt, 0
    while at + 1 < prompt + count:
        accepted = int(hits[:, at - 1].long().cumprod(0).sum())
        total += accepted
        at += accepted + 1
    return total


# parity


@dataclass
class Parity:
    """Total variations of each compared proposal, and on how many of them the first choice is the same."""

    variations: list[float]
    same: int

    @property
    def mean(self) -> float:
        return sum(self.variations) / len(self.variations)


def parity(case: Case) -> Result:
    """Proposals, step by step with a cache, against the training-time distribution for the same tokens.

    Training is the fp32 masters where they are kept, so that what was written is judged too; each export of the run is
    compared like the draft. Mean total variation at most MOST_VARIATION.
    """
    trained = case.masters or case.draft
    prompts = [list(prompt.ids) for prompt in case.prompts[:PARITY_TEXTS]]
    served = {case.folder.name: case.draft}
    problems: list[Problem] = []
    folders = sorted((case.run.path / "export").glob("*")) if case.recipe else []
    for folder in folders:
        if not (folder / "config.json").exists():
            continue
        try:
            served[f"export/{folder.name}"] = load_draft(folder, case.target)
        except DraftError as error:
            problems.append((f"export/{folder.name} does not load: {error}", "drafttrain export"))
    evidence, means = [], {}
    for name, draft in served.items():
        found = compared(trained, draft, case.target, prompts, case.k)
        means[name], count = found.mean, len(found.variations)
        told = f"{name}: mean total variation {found.mean:.4f}, the same first choice in {found.same} of {count}"
        if found.mean > MOST_VARIATION:
            problems.append((f"{told}: it does not serve as it was trained", AGAIN))
        else:
            evidence.append(told)
    against = "fp32 masters" if case.masters else "the same weights, training's way"
    return verdict(problems, [*evidence, f"against {against}, {len(prompts)} texts, K = {case.k}"], variation=means)


@torch.no_grad()
def compared(trained: Draft, served: Draft, target: Target, prompts: Sequence[Sequence[int]], k: int) -> Parity:
    """Rounds of proposals behind each prompt with ROUNDS drafts accepted, against `trained` on the very same states."""
    found = Parity([], 0)
    for prompt in prompts:
        _compare(found, trained, served, target, list(prompt), k)
    return found


def _compare(found: Parity, trained: Draft, served: Draft, target: Target, prompt: list[int], k: int) -> None:
    n = target.num_layers
    layers = sorted({*trained.feature_layers, *served.feature_layers, n})
    proposer = served.proposer(target)
    ids, kept = list(prompt), {}
    states = target.hidden_states(torch.tensor([ids]), None, layers)
    kept = dict(states)
    following = int(target.head()(states[n][0, -1:])[0].argmax())
    sampling = Sampling(temperature=1.0, draft_mode="probabilistic")
    proposer.begin(_step(target, served, ids, states, 0), torch.tensor([following]), sampling, Streams(0, [0]))
    for accepted in ROUNDS:
        proposal = proposer.propose(torch.tensor([k]))
        drafts = proposal.tokens[0, : int(proposal.lengths[0])].tolist()
        if not drafts:
            return
        texts = _texts(target, [*ids, following, *drafts], kept)
        _judge(found, trained, texts, len(ids) - 1, proposal, len(drafts))
        taken = min(accepted, len(drafts))
        new = [following, *drafts[:taken]]
        ids += new
        states = target.hidden_states(torch.tensor([ids]), None, layers)
        kept = {layer: torch.cat([kept[layer], state[:, -len(new) :]], 1) for layer, state in states.items()}
        following = int(target.head()(states[n][0, -1:])[0].argmax())
        step = _step(target, served, ids, kept, len(ids) - len(new))
        path = torch.arange(max(taken, 1))[None].masked_fill(torch.arange(max(taken, 1)) >= taken, -1)
        proposer.advance(step, path, torch.tensor([following]))


def _step(target: Target, draft: Draft, ids: Sequence[int], states: dict[int, Tensor], start: int) -> TargetStep:
    """What the proposer would be given for the positions from `start` on."""
    places = torch.arange(start, len(ids))[None]
    features = [states[k][:, start:].to(target.device) for k in draft.feature_layers]
    return TargetStep(
        tokens=torch.tensor([ids[start:]]),
        positions=places,
        lengths=torch.tensor([len(ids) - start]),
        logits=torch.zeros(1, 1, target.vocab_size),
        features=torch.cat(features, -1) if features else None,
        last_hidden=states[target.num_layers][:, start:],
    )


def _texts(target: Target, ids: Sequence[int], states: dict[int, Tensor]) -> Texts:
    """A text whose last tokens the target has not read: their states are zeros, which no row in question sees."""
    tokens = torch.tensor([list(ids)], device=target.device)
    missing = len(ids) - states[target.num_layers].shape[1]
    padded = {k: torch.nn.functional.pad(state, (0, 0, 0, missing)) for k, state in states.items()}
    nothing = torch.zeros_like(tokens)
    return Texts(tokens, nothing.bool(), torch.tensor([len(ids)]), padded, nothing)


def _judge(found: Parity, trained: Draft, texts: Texts, row: int, proposal, count: int) -> None:
    for i, states in enumerate(step_states(trained, texts, count)):
        ours, theirs = torch.zeros(2, 1 + int(max(trained.draft_ids.max(), proposal.q_ids.max())))
        logits = logits_of(trained, i, states[0, row : row + 1])[0].float()
        ours[trained.draft_ids.cpu()] = logits.softmax(-1).cpu()
        theirs[proposal.q_ids.cpu()] = proposal.q[0, i].float().cpu()
        found.variations.append(float((ours - theirs).abs().sum() / 2))
        found.same += int(ours.argmax() == theirs.argmax())
