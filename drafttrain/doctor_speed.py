"""The check of speed: slower than plain decoding although drafts are accepted, and which cost is the reason."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drafttrain.doctor_case import Case, Problem, Result, Unmeasured, verdict
from drafttrain.evaluate.cost import best_k, interpolate, speedup_at
from drafttrain.evaluate.summary import costs, speedup
from drafttrain.export.card import Source, newest_report

SLOWER = 1.0
NOISE = 0.97
"""What is measured here, on few prompts and a machine that does other things, must be clearly slower."""
FEW_TOKENS = 1.5
"""Tokens an iteration below which no cost is to blame first: every second draft is refused."""


def speed(case: Case) -> Result:
    """The best K at each number of requests against plain decoding, from the run's newest report.json about this very
    draft, else from the answers given here; where it is slower, the cost that would have to fall (`reason`).
    """
    found = newest_report(Source.of(case.folder), case.draft.method, case.folder)
    if found is not None:
        path, report = found
        rows, limit, where = list(_reported(report["runs"], case.draft.method)), SLOWER, f"of {path}"
    else:
        rows, limit, where = [_measured(case)], NOISE, f"measured here on {len(case.prompts)} prompts"
    if not rows:
        raise Unmeasured(f"{path} has no run of a trained {case.draft.method} draft beside plain decoding")
    problems: list[Problem] = []
    evidence = [where]
    for run in rows:
        told = _words(run)
        if run["speedup"] < limit:
            why, mend = reason(run)
            problems.append((f"{told}: {why}", mend))
        else:
            evidence.append(told)
    keys = ("concurrency", "k", "speedup", "mean_acceptance_length", "c", "v", "o")
    return verdict(problems, evidence, runs=[{key: run[key] for key in keys} for run in rows])


def _reported(runs: Sequence[dict[str, Any]], method: str) -> Iterator[dict[str, Any]]:
    """At each number of requests the fastest exact run of the trained draft."""
    best: dict[int, dict] = {}
    for run in runs:
        ours = run["draft"] == method and run["trained"] and not run.get("lossy")
        if ours and run["speedup"] is not None and run["c"] is not None:
            before = best.get(run["concurrency"])
            best[run["concurrency"]] = run if before is None or run["speedup"] > before["speedup"] else before
    yield from (best[rows] for rows in sorted(best))


def _measured(case: Case) -> dict[str, Any]:
    answers = case.answers
    if answers.drafted is None:
        raise Unmeasured(f"the draft does not load: {case.refusal}")
    found, counts = speedup(answers.drafted, answers.plain), answers.drafted.counts
    if found is None or not counts.iterations:
        raise Unmeasured("every answer ended with its first token: nothing was timed")
    run = costs(answers.drafted, answers.k, answers.plain)
    rates = counts.per_position_acceptance
    run |= {"k": answers.k, "concurrency": 1, "speedup": found, "per_position_acceptance": rates}
    return run | {"mean_acceptance_length": counts.mean_acceptance_length, "tree": None}


def _words(run: Mapping[str, Any]) -> str:
    k, c, v, o = (run[name] for name in ("k", "c", "v", "o"))
    return (
        f"{run['concurrency']} at a time, K = {k}: {run['speedup']:.2f}x; {run['mean_acceptance_length']:.2f} tokens "
        f"for {v + k * c + o:.2f} plain steps (drafting {k * c:.2f}, verifying {v:.2f}, rest {o:.2f})"
    )


def reason(run: Mapping[str, Any]) -> tuple[str, str]:
    """(which part is to blame, mend) of a run slower than plain decoding, by the cost model S = tau / (v + K c + o):
    the first thing that, put right alone, brings S to 1: K, then the cost of drafting, of verifying, of the rest. v
    between 1 and K + 1 tokens is taken as linear.
    """
    k, c, v, o, tau = (run[name] for name in ("k", "c", "v", "o", "mean_acceptance_length"))
    rows = run["concurrency"]
    rates = [*run["per_position_acceptance"][:k], *[0.0] * (k - len(run["per_position_acceptance"]))]
    line = [interpolate({0: 1.0, k: v}, i) for i in range(k + 1)]
    less = best_k(rates, c, line, o)
    if 0 < less < k and not run.get("tree") and speedup_at(rates, less, c, line, o) > 1:
        gain = speedup_at(rates, less, c, line, o)
        return (
            f"too many drafts a round; K = {less} would give about {gain:.2f}x",
            f"--k {less} (drafttrain tune finds it)",
        )
    if tau / (v + o) > 1:
        mend = "a smaller draft: fewer or narrower layers, a smaller data.draft_vocab (its head), a capture on a GPU"
        return f"drafting is dear, c = {c:.3f} of a plain step a draft", mend
    if tau / (1 + k * c + o) > 1:
        if rows > 1:
            mend = "serve without a draft from the break-even on (drafttrain tune), or a smaller K"
            return (
                f"verifying {k + 1} tokens of {rows} requests costs {v:.2f} plain steps: the batch is compute-bound",
                mend,
            )
        return (
            f"verifying {k + 1} tokens costs {v:.2f} plain steps",
            "a smaller K, or hardware where verifying is cheap",
        )
    if tau / (v + k * c) > 1:
        return f"the rest of the loop costs {o:.2f} plain steps", "an engine, or a larger target: overhead counts less"
    if tau < FEW_TOKENS:
        return f"only {tau:.2f} tokens an iteration: acceptance is too low to pay", "see the checks above"
    return "no single cost is to blame: drafting, verifying and acceptance all fall short", "drafttrain tune"
