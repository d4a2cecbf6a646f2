"""The losslessness certificate, saved with every report: evidence that the emitted tokens are distributed as the
target's p.

The loop's own verification decodes small languages, in which each token depends on the one before it alone, so that
the distribution of every text is known. The claim under test: arXiv 2211.17192, appendix A.1.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.drafts.base import Proposal
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import BLOCK, Sampling, greedy_choice, inverse_cdf, warp
from drafttrain.specdec.verify import verify as verify_drafts
from drafttrain.target import Target

Verify = Callable[[Tensor, Proposal, Sampling, Tensor], tuple[Tensor, Tensor]]
"""(logits, proposal, sampling, uniforms) -> (path, next token), as drafttrain.specdec.verify.verify."""

SIGNIFICANCE = 1e-4
DRAWS = 20_000
TOLERANCE = 1e-6  # Of an enumerated probability: what fp32 rounds.
LEAST_EXPECTED = 5
KEPT_TOKENS = 599  # Of recorded logits; all others become one token. That leaves two blocks of the inverse CDF.
PREFIX = 64  # Most tokens of a prefix whose logits are recorded.
CHUNK = 2**17  # Logits at one node in a batch of draws: what caches hold is fastest.

# Parents of the nodes of a round.
CHAIN, LONG_CHAIN, SIBLINGS, TREE, WIDE_TREE = (-1, 0), (-1, 0, 1, 2), (-1, -1), (-1, -1, 0), (-1, -1, 0, 0, 1)

# Row i of each table: after token i. The first pair's wrong output is known, (.35, .39, .26): that is the control.
FIXED_P = ((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.7, 0.1, 0.2))
FIXED_Q = ((0.2, 0.5, 0.3), (0.3, 0.3, 0.4), (0.2, 0.5, 0.3))
CUT = (0.05, 0.02)  # The weights of two tokens more, which top-k cuts from p and q.
TEMPERATURE = 0.7
# Here every threshold that a uniform is compared with, up to a second sibling's and its residual's, is a multiple of
# 1/12: on a grid of 12 uniforms in the middle of equal parts all shares come out exactly.
TOY_P = ((1 / 2, 1 / 4, 1 / 4), (1 / 4, 1 / 2, 1 / 4), (1 / 3, 1 / 3, 1 / 3))
TOY_Q = ((1 / 12, 3 / 4, 1 / 6), (3 / 16, 5 / 16, 1 / 2), (2 / 3, 1 / 12, 1 / 4))
GRID = 12


@dataclass(frozen=True)
class Language:
    """Row y % S says what follows token y: raw logits [S, V], their p float64 [S, V] by a method of its own, the
    draft's q fp32 [S, Vd] over the target ids q_ids [Vd]."""

    logits: Tensor
    p: Tensor
    q: Tensor
    q_ids: Tensor
    sampling: Sampling


def certificate(logits: Tensor | None = None, *, seed: int = 0, verify: Verify = verify_drafts) -> dict:
    """The certificate as report.json holds it; "passed": every check passed, and the wrong sampler was found out.

    logits [P, V]: recorded target logits after a few prefixes (`record_logits`); None leaves these checks out.
    verify: the verification under test. Takes seconds; raises SamplingError on NaN logits.
    """
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # For small operations a second thread costs more than it saves, far more on a busy CPU.
    try:
        checks, control = _run(logits, torch.Generator().manual_seed(seed), verify)
    finally:
        torch.set_num_threads(threads)
    passed = control["passed"] and all(check["passed"] for check in checks.values())
    result = {"passed": passed, "seconds": time.perf_counter() - start, "significance": SIGNIFICANCE, "draws": DRAWS}
    return result | {"checks": checks, "control": control}


def _run(logits: Tensor | None, generator: Generator, verify: Verify) -> tuple[dict[str, dict], dict]:
    device = torch.device("cpu") if logits is None else logits.device
    checks = {"greedy": _check_greedy(torch.randn(64, 64, generator=generator).to(device), verify, generator)}
    if logits is not None:
        checks["recorded_greedy"] = _check_greedy(logits, verify, generator)
    for mode in ("one_hot", "probabilistic"):
        toy = _table_language(TOY_P, TOY_Q, (), mode, device)
        fixed = _table_language(FIXED_P, FIXED_Q, CUT, mode, device)
        for shape, exact, parents in (("chain", CHAIN, CHAIN), ("tree", SIBLINGS, TREE)):
            checks[f"exact_{shape}_{mode}"] = _check_exactly(toy, exact, verify)
            texts = _draw(fixed, 0, parents, DRAWS, verify, generator)
            checks |= _chi_squared_checks(f"fixed_{shape}_{mode}", fixed, [texts])
        if logits is not None:
            recorded, count = _recorded_language(logits, mode, generator), -(-DRAWS // len(logits))
            texts = [_draw(recorded, row, CHAIN, count, verify, generator) for row in range(len(logits))]
            checks |= _chi_squared_checks(f"recorded_{mode}", recorded, texts)
    return checks, _check_control(fixed, verify, generator)


def record_logits(target: Target, prompts: Sequence[Sequence[int]], count: int = 4) -> Tensor:
    """The target's raw logits fp32 [P, V] after the first 64 tokens, at most, of the first `count` prompts (token
    ids)."""
    prefixes = [list(prompt[: min(PREFIX, target.max_positions)]) for prompt in prompts[:count]]
    assert prefixes and all(prefixes), "an empty prompt"
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    tokens = pad_sequence([torch.tensor(prefix) for prefix in prefixes], batch_first=True)
    cache = RaggedCache(len(prefixes), capacity=tokens.shape[1])
    return target.step(tokens, cache, lengths, last_only=True).logits[:, 0].float()


def chi_squared(observed: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom, from float64 [cells] with equal sums; cells that expect fewer than 5
    are counted as one. Infinite where something was seen that cannot be."""
    if observed[expected == 0].any():
        return float("inf"), 1
    large = expected >= LEAST_EXPECTED
    seen, due = (torch.cat([x[large], x[~large].sum()[None]]) for x in (observed, expected))
    if due[-1] < LEAST_EXPECTED and len(due) > 1:
        smallest = due[:-1].argmin()
        seen[smallest] += seen[-1]
        due[smallest] += due[-1]
        seen, due = seen[:-1], due[:-1]
    return float(((seen - due) ** 2 / due).sum()), len(due) - 1


def survival(statistic: float, degrees: int) -> float:
    """The chance that a chi-squared variable exceeds the statistic; 1 without degrees of freedom."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if degrees else 1.0


def resample_from_target(verify: Verify) -> Verify:
    """The deliberately wrong sampler: after a refusal in a chain it draws from p instead of the residual."""

    def wrong(logits, proposal, sampling, uniforms):
        path, next_token = verify(logits, proposal, sampling, uniforms)
        accepted, rows = (path >= 0).sum(1), torch.arange(len(path))
        drawn = inverse_cdf(warp(logits[rows, accepted], sampling), uniforms[rows, proposal.lengths]).cpu()
        return path, torch.where(accepted < proposal.lengths, drawn, next_token)

    return wrong


def _table_language(p_table, q_table, cut: Sequence[float], mode: str, device: torch.device) -> Language:
    """The logits are those that the temperature, and top-k where there is something to cut, turn into the tables."""
    p, q = (torch.tensor(table, dtype=torch.float64, device=device) for table in (p_table, q_table))
    tail = torch.tensor(cut, dtype=torch.float64, device=device).expand(len(p), -1)
    sampling = Sampling(temperature=TEMPERATURE, top_k=p.shape[1] if cut else 0, draft_mode=mode)
    logits, draft = ((torch.cat([table, tail], 1).log() * TEMPERATURE).float() for table in (p, q))
    q_ids = torch.arange(logits.shape[1], device=device)
    return Language(logits, F.pad(p, (0, len(cut))), warp(draft, sampling), q_ids, sampling)


def _recorded_language(logits: Tensor, mode: str, generator: Generator) -> Language:
    """The recorded rows over their likeliest tokens, all others as one token; the draft is a disturbed copy that lacks
    every fifth token."""
    logits = logits.float()
    if logits.shape[1] > KEPT_TOKENS + 1:
        kept = logits.log_softmax(-1).amax(0).topk(KEPT_TOKENS).indices
        rest = logits.index_fill(1, kept, -torch.inf).logsumexp(-1, keepdim=True)
        logits = torch.cat([logits[:, kept], rest], 1)
    noise = torch.randn(logits.shape, generator=generator).to(logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ids = ids[ids % 5 != 4]
    sampling = Sampling(temperature=1.0, draft_mode=mode)
    return Language(logits, logits.double().softmax(-1), warp((0.7 * logits + noise)[:, ids], sampling), ids, sampling)


def _round(language: Language, start: Tensor, parents, lengths: Tensor, choose, uniforms: Tensor, verify) -> Tensor:
    """What one round emits after the tokens start [B]: the accepted drafts and the token behind them, int64 [B, N+1],
    -1 padded.

    choose(i, weights [B, Vd]) -> the draft index [B] of node i; siblings are chosen without replacement. lengths and
    uniforms are as verify takes them."""
    tokens, q, rows, left = [], [], [start % len(language.p)], {}
    for i, parent in enumerate(parents):
        q.append(language.q[rows[parent + 1]])
        weights = left.get(parent, q[-1])
        index = choose(i, weights)
        left[parent] = weights.scatter(1, index[:, None], 0.0)
        tokens.append(language.q_ids[index].cpu())
        rows.append(tokens[-1] % len(language.p))
    drafts = torch.stack(tokens, 1)
    chain = tuple(parents) == tuple(range(-1, len(parents) - 1))
    proposal = Proposal(drafts, lengths, None if chain else torch.tensor(parents).expand(len(start), -1))
    if language.sampling.draws_drafts:
        proposal.q, proposal.q_ids = torch.stack(q, 1), language.q_ids
    path, next_token = verify(language.logits[torch.stack(rows, 1)], proposal, language.sampling, uniforms)
    text = drafts.gather(1, path.clamp_min(0)).masked_fill(path < 0, -1)
    text = F.pad(text, (0, len(parents) + 1 - path.shape[1]), value=-1)
    return text.scatter(1, (path >= 0).sum(1, keepdim=True), next_token[:, None])


def _likeliest(i: int, weights: Tensor) -> Tensor:
    return weights.argmax(-1)


def _drawn_round(language: Language, start: Tensor, parents, verify, generator, least: int = 0) -> Tensor:
    """A round of `least` to N drafts a row, drawn from q, or the likeliest in one-hot mode."""
    N = len(parents)
    lengths = torch.randint(least, N + 1, start.shape, generator=generator)
    uniforms = torch.rand(len(start), 2 * N + 1, generator=generator, dtype=torch.float64)

    def draw(i: int, weights: Tensor) -> Tensor:
        return inverse_cdf(weights, uniforms[:, i])

    choose = draw if language.sampling.draws_drafts else _likeliest
    return _round(language, start, parents, lengths, choose, uniforms[:, N:], verify)


def _draw(language: Language, row: int, parents, count: int, verify, generator) -> Tensor:
    """The first two tokens, int64 [count, 2], of texts that follow token `row`, in rounds of 0 to N drafts."""
    texts = []
    for start in torch.full((count,), row).split(max(CHUNK // max(language.logits.shape[1], BLOCK), 1)):
        text = _drawn_round(language, start, parents, verify, generator)[:, :2]
        short = text[:, 1] < 0
        if short.any():
            text[short, 1] = _drawn_round(language, text[short, 0], parents, verify, generator)[:, 0]
        texts.append(text)
    return torch.cat(texts)


def _check_exactly(language: Language, parents: Sequence[int], verify: Verify) -> dict:
    """After every token: the joint of three tokens, over all drafts and a grid of all uniforms, where what a round
    leaves open is completed by p. If that is p's joint, so is any number of rounds', by induction."""
    V, N = language.p.shape[1], len(parents)
    drawn = language.sampling.draws_drafts
    drafts = torch.cartesian_prod(*[torch.arange(V if drawn else 1)] * N)
    points = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    uniforms = torch.cartesian_prod(*[points] * (N + 1)).repeat(len(drafts), 1)
    drafts = drafts.repeat_interleave(GRID ** (N + 1), 0)
    lengths = torch.full((len(drafts),), N)
    p, error = language.p.cpu(), 0.0
    for row in range(len(p)):
        chances = torch.full((len(drafts),), GRID ** -(N + 1.0), dtype=torch.float64)

        def enumerate_drafts(i: int, weights: Tensor, chances=chances) -> Tensor:
            index = drafts[:, i].to(weights.device)
            chances.mul_((weights.gather(1, index[:, None])[:, 0].double() / weights.double().sum(1)).cpu())
            return index

        choose = enumerate_drafts if drawn else _likeliest
        text = _round(language, torch.full_like(lengths, row), parents, lengths, choose, uniforms, verify)
        emitted = (text >= 0).sum(1)
        found, expected = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for count in range(1, 4):
            following = p[row] if count == 1 else p
            cell = (text[:, :count] * V ** torch.arange(count - 1, -1, -1)).sum(1)[emitted == count]
            ended = torch.bincount(cell, chances[emitted == count], V**count).view([V] * count)
            found, expected = found[..., None] * following + ended, expected[..., None] * following
        error = max(error, float((found - expected).abs().max()))
    return {"passed": error <= TOLERANCE, "largest_error": error, "tolerance": TOLERANCE}


def _check_greedy(logits: Tensor, verify: Verify, generator: Generator) -> dict:
    """At temperature 0, with drafts that are right now and then: the text is the path of argmaxes, in chains and trees
    of 0 to N drafts. largest_error: the share of rows that leave it."""
    q = logits.float() + logits.float().std() * torch.randn(logits.shape, generator=generator).to(logits.device) / 2
    language = Language(logits, logits, q.softmax(-1), torch.arange(logits.shape[1]).to(q.device), Sampling())
    best, wrong = greedy_choice(logits).cpu(), []
    for parents in (LONG_CHAIN, WIDE_TREE):
        start = torch.arange(len(logits)).repeat(max(256 // logits.shape[1], 1))
        lengths = torch.randint(0, len(parents) + 1, start.shape, generator=generator)
        uniforms = torch.zeros(len(start), len(parents) + 1)
        text = _round(language, start, parents, lengths, _likeliest, uniforms, verify)
        path = [best[start % len(best)]]
        for _ in parents:
            path.append(best[path[-1] % len(best)])
        wrong.append(((text != torch.stack(path, 1)) & (text >= 0)).any(1))
    error = float(torch.cat(wrong).double().mean())
    return {"passed": error == 0, "largest_error": error}


def _chi_squared_checks(name: str, language: Language, texts: Sequence[Tensor]) -> dict[str, dict]:
    """The first token and the joint of two, over texts [n, 2] that follow token 0, 1, ..; their statistics add up. In
    the joint the 8 likeliest first and second tokens stand alone, the others together."""
    p, V = language.p.cpu(), language.p.shape[1]
    step = p[torch.arange(V) % len(p)]
    first, joint = [], []
    for row, text in enumerate(texts):
        due = len(text) * p[row]
        first.append(chi_squared(torch.bincount(text[:, 0], minlength=V).double(), due))
        ranks = [chance.argsort(descending=True).argsort() for chance in (p[row], p[row] @ step)]
        bins = [F.one_hot(rank.clamp_max(8), min(V, 9)).double() for rank in ranks]
        observed = bins[0][text[:, 0]].T @ bins[1][text[:, 1]]
        joint.append(chi_squared(observed.flatten(), (bins[0].T @ (due[:, None] * step) @ bins[1]).flatten()))
    return {f"{name}_first": _pooled(first), f"{name}_joint": _pooled(joint)}


def _pooled(statistics: Sequence[tuple[float, int]]) -> dict:
    degrees = sum(degrees for _, degrees in statistics)
    p_value = survival(sum(statistic for statistic, _ in statistics), degrees)
    return {"passed": p_value >= SIGNIFICANCE, "p_value": p_value, "degrees": degrees}


def _check_control(language: Language, verify: Verify, generator: Generator) -> dict:
    """The fixed pair under the wrong sampler, which must be found out: "passed" says that it was."""
    wrong, starts = resample_from_target(verify), torch.zeros(DRAWS, dtype=torch.long).split(CHUNK // BLOCK)
    text = torch.cat([_drawn_round(language, start, CHAIN, wrong, generator, least=len(CHAIN)) for start in starts])
    counts = torch.bincount(text[:, 0], minlength=language.p.shape[1]).double()
    p_value = survival(*chi_squared(counts, DRAWS * language.p[0].cpu()))
    return {"passed": p_value < SIGNIFICANCE, "p_value": p_value, "first_token": (counts / DRAWS).tolist()}
