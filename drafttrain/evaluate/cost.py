"""The cost model of speculative decoding: S = tau / (v(K) + K c + o), in plain steps, and the K that it recommends.

Acceptance rates are joint (the first i drafts all accepted) unless a call says otherwise; Leviathan et al.,
arXiv 2211.17192, section 3, gives the case of independent acceptance.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

Reading = Literal["joint", "conditional"]


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of one iteration with K drafts that are accepted independently: (1 - a^(K+1)) / (1 - a)."""
    return sum(acceptance**i for i in range(k + 1))


def joint_from_conditional(rates: Sequence[float]) -> list[float]:
    """Joint rates (the first i drafts all accepted) from each position's rate given the one before it."""
    joint, product = [], 1.0
    for rate in rates:
        product *= rate
        joint.append(product)
    return joint


def tau_at(rates: Sequence[float], k: int) -> float:
    """Tokens of one iteration when only the first K positions are drafted: 1 + the sum of their joint rates."""
    return 1 + sum(rates[:k])


def speedup_at(rates: Sequence[float], k: int, c: float, v: float | Sequence[float] = 1.0, o: float = 0.0) -> float:
    """S = tau / (v(K) + K c + o) from joint rates. c, v, o in plain steps; v: one number, or v[K] for K = 0, 1, .."""
    return tau_at(rates, k) / (_verify_cost(v, k) + k * c + o)


def next_pays(rates: Sequence[float], k: int, c: float, v: float | Sequence[float] = 1.0, o: float = 0.0) -> bool:
    """Whether drafting position K + 1 raises S: m[K+1] (v(K) + K c + o) > tau_K (c + v(K+1) - v(K)), joint rates m."""
    now, more = _verify_cost(v, k), _verify_cost(v, k + 1)
    return rates[k] * (now + k * c + o) > tau_at(rates, k) * (c + more - now)


def best_k(
    rates: Sequence[float],
    c: float,
    v: float | Sequence[float] = 1.0,
    o: float = 0.0,
    reading: Reading = "joint",
) -> int:
    """The K in 0..len(rates) with the highest S, the smallest of equals. reading: what the rates are.

    While v grows no slower from token to token, this is the first K at which `next_pays` says no; a v with steps in it
    (tiles of a matrix kernel) can have a better K behind a worse one, so all are compared.
    """
    joint = joint_from_conditional(rates) if reading == "conditional" else rates
    return max(range(len(joint) + 1), key=lambda k: (speedup_at(joint, k, c, v, o), -k))


def _verify_cost(v: float | Sequence[float], k: int) -> float:
    return v if isinstance(v, int | float) else v[k]


def fit_line(points: Mapping[int, float]) -> tuple[float, float]:
    """(a, b) of the least-squares line a + b x through {x: y}; through the origin where there is only one point."""
    if len(points) == 1:
        ((x, y),) = points.items()
        return 0.0, y / x
    mean_x, mean_y = sum(points) / len(points), sum(points.values()) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / sum((x - mean_x) ** 2 for x in points)
    return mean_y - slope * mean_x, slope


def interpolate(points: Mapping[float, float], x: float) -> float:
    """Piecewise linear through {x: y}, held constant outside."""
    xs = sorted(points)
    at = bisect_left(xs, x)
    if at == 0 or at == len(xs):
        return points[xs[0] if at == 0 else xs[-1]]
    low, high = xs[at - 1], xs[at]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)


@dataclass(frozen=True)
class CostModel:
    """What a calibration pass found of one draft at one concurrency; times in plain steps, plain decoding being 1.

    acceptance: {calibrated K: joint rates}. draft: (a, b), a round's drafting takes a + b K (an EAGLE-3 round is one
    commit pass and K - 1 steps). verify: {tokens of a row: time of the target's forward}. rest: o. begin: the proposer
    reading a prompt. drafting: {calibrated K: share of iterations with at least 1, 2, .. drafts}, empty for always K;
    lookup drafts what it finds. nodes: {calibrated K: drafted nodes} of a tree of depth K. in_loop: {calibrated K: what
    a forward cost in the loop / what `verify` says}, 0: plain. concurrency: rows of a batch.
    """

    acceptance: Mapping[int, Sequence[float]]
    draft: tuple[float, float]
    verify: Mapping[float, float]
    rest: float = 0.0
    begin: float = 0.0
    drafting: Mapping[int, Sequence[float]] = field(default_factory=dict)
    nodes: Mapping[int, float] = field(default_factory=dict)
    in_loop: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})
    concurrency: int = 1

    def drafted(self, k: int) -> dict[int, float]:
        """{j: share of a batch's forwards whose longest row has j drafts}, the rows independent."""
        if not self.drafting or not k:
            return {k: 1.0}
        at_most = [(1 - share) ** self.concurrency for share in rates_at(self.drafting, k)] + [1.0]
        return {j: now - before for j, (before, now) in enumerate(pairwise([0.0, *at_most]))}

    def verify_at(self, k: int) -> float:
        """v(K): one forward of the target over the tokens that K asks for; K = 0: plain decoding's."""
        shares = {interpolate(self.nodes, k): 1.0} if self.nodes and k else self.drafted(k)
        table = sum(share * interpolate(self.verify, 1 + drafts) for drafts, share in shares.items())
        return table * interpolate(self.in_loop, k)

    def predict(self, k: int, tokens: float | None = None) -> dict[str, float]:
        """{"k", "tau", "speedup", "c", "v", "o"} at K.

        tokens: decoded tokens of a request; given, S counts what a run of that length pays besides: the proposer
        reading the prompt, and the tokens of the last iteration that lie behind the end. None: the steady state.
        """
        rates = rates_at(self.acceptance, k)
        tau = tau_at(rates, k)
        v, draft = self.verify_at(k), self.draft[0] + self.draft[1] * k
        iteration = v + draft + self.rest
        speedup = tau / iteration
        if tokens is not None:
            # Renewal theory: steps X pass a distant goal by (E[X^2] - E[X]) / (2 E[X]) on average.
            square = 1 + sum((2 * i + 3) * rate for i, rate in enumerate(rates))
            iterations = (tokens + (square - tau) / (2 * tau)) / tau
            speedup = tokens / (iterations * iteration + self.begin)
        return {"k": k, "tau": tau, "speedup": speedup, "c": draft / k, "v": v, "o": self.rest}

    def best(self, ks: Sequence[int], tokens: float | None = None) -> dict[str, float]:
        """The prediction with the highest speedup among the given K (at least 1), the smallest of equals."""
        return max((self.predict(k, tokens) for k in sorted(ks)), key=lambda found: found["speedup"])


def rates_at(calibrated: Mapping[int, Sequence[float]], k: int) -> list[float]:
    """Joint rates of positions 1..K at K, from those at the calibrated K.

    They depend on K: a small K spends more of its iterations where drafting is easy. Each position is interpolated in
    log K, along which a mixture of easy and hard stretches is nearly straight; below the smallest K that has measured a
    position, it keeps its ratio to the position before. A draft that never went so deep has rate 0 there.
    """
    assert k <= max(calibrated), f"K = {k} lies beyond the deepest calibrated one, {max(calibrated)}"
    table = {one: [*rates[:one], *[0.0] * (one - len(rates))] for one, rates in calibrated.items()}
    out: list[float] = []
    for i in range(k):
        points = {math.log(one): rates[i] for one, rates in table.items() if one > i}
        nearest = table[min(one for one in table if one > i)]
        rate = interpolate(points, math.log(k))
        if i and math.log(k) < min(points) and nearest[i - 1]:
            rate = nearest[i] * out[i - 1] / nearest[i - 1]
        out.append(min(rate, out[-1]) if out else rate)
    return out


def break_even(speedups: Mapping[int, float]) -> float | None:
    """The concurrency at which S falls to 1, log-linear between the measured ones; None if it never does there.

    speedups: {concurrency: S}. Where S is at most 1 from the start, the smallest concurrency.
    """
    points = sorted(speedups.items())
    if points and points[0][1] <= 1:
        return float(points[0][0])
    for (before, earlier), (concurrency, now) in pairwise(points):
        if now <= 1:
            share = (earlier - 1) / (earlier - now)
            return math.exp(math.log(before) + share * math.log(concurrency / before))
    return None


def model_from_runs(
    runs: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], widths: Mapping[int, float], batches: int
) -> CostModel:
    """The model of one draft from its runs in a calibration report (one for each calibrated K) and their plain run.

    widths: {n: seconds} of bare forwards over n tokens of each row, at the same batch and context. They give v its
    shape between the calibrated K; at those it is the loop's own. batches: how many of them the report decoded.
    """
    step = _seconds_a_round(plain, "verify") + _seconds_a_round(plain, "rest")
    tree = runs[0]["tree"] is not None
    table = CostModel(
        acceptance={run["k"]: tuple(run["per_position_acceptance"]) for run in runs},
        draft=fit_line({run["k"]: _seconds_a_round(run, "draft") / step for run in runs}),
        verify={n: seconds / step for n, seconds in widths.items()},
        rest=sum(_seconds_a_round(run, "rest") for run in runs) / len(runs) / step,
        begin=sum(run["seconds"]["begin"] for run in runs) / len(runs) / batches / step,
        drafting={} if tree else {run["k"]: _at_least(run["draft_lengths"]) for run in runs},
        nodes={run["k"]: run["drafted_tokens"] / run["iterations"] for run in runs} if tree else {},
        concurrency=plain["concurrency"],
    )
    in_loop = {run["k"]: _seconds_a_round(run, "verify") / step / table.verify_at(run["k"]) for run in (plain, *runs)}
    return replace(table, in_loop=in_loop)


def _seconds_a_round(run: Mapping[str, Any], phase: str) -> float:
    return run["seconds"][phase] / run["rounds"]


def _at_least(lengths: Sequence[int]) -> tuple[float, ...]:
    """Share of iterations that drafted at least 1, 2, .. tokens, from how many drafted 0, 1, 2, .. of them."""
    return tuple(sum(lengths[j:]) / sum(lengths) for j in range(1, len(lengths)))
