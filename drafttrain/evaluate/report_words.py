"""The report's texts: what each figure means, what a reader must know first, and the certificate in plain words.

One name for each figure, and the formula it is computed with.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from drafttrain.evaluate.report_summary import (
    Group,
    Run,
    is_impossible,
    is_trained_draft,
    mark_of,
    percent,
    series_label,
)
from drafttrain.specdec.certificate import FIXED_P

REPETITION_NOTE_ABOVE = 0.2
OVERLAP_NOTE_ABOVE = 0.01

GLOSSARY = (
    ("Iteration", "One forward pass of the target after the prefill, per request, also when nothing was drafted."),
    ("Draft round", "An iteration with at least one drafted token (what vLLM counts as num_drafts)."),
    ("Acceptance rate", "Accepted draft tokens / drafted tokens. Not defined for trees."),
    (
        "Mean acceptance length (tau)",
        "1 + accepted tokens / iterations: tokens per target pass, the bonus or replacement token included. Pooled "
        "over all iterations, never a mean of per-request means. A speedup cannot exceed it.",
    ),
    (
        "Per-position acceptance",
        "At position i: iterations in which the first i drafts were all accepted / iterations. Joint, so it never "
        "rises with i, and tau is 1 + its sum.",
    ),
    ("Conditional acceptance", "Per-position acceptance at i / that at i - 1: how good draft i is once it is reached."),
    (
        "step_acceptance/k",
        "Training curves only: how often step k of the training-time unroll hits the target's first choice, given the "
        "right tokens before it. Unconditional and teacher-forced, so not the per-position acceptance of the loop.",
    ),
    ("Tokens/s", "Decode only, after the token that the prefill yields; median, minimum and maximum over prompts."),
    ("End-to-end tokens/s, TTFT", "The same with the prefill included; the time until the first token."),
    (
        "Speedup",
        "Pooled decode tokens/s over that of plain decoding in the same loop, same prompts, same sampling, "
        "configurations interleaved per prompt. Interval: 95%, bootstrap over prompts.",
    ),
    (
        "Requests at a time",
        "Concurrency: prompts decoded in one batch. Tokens/s are then those of one request, except where they are "
        "called those of all requests. Plain decoding is measured anew at each.",
    ),
    (
        "Break-even",
        "The number of requests at a time at which a draft at this K falls to plain decoding's speed, log-linear "
        "between the measured ones. Beyond it the draft costs more than it saves.",
    ),
    (
        "ITL",
        "Inter-token latency: the time between two deliveries to one request; median and 95th percentile.",
    ),
    (
        "Peak memory",
        "The most that the device had allocated while this configuration ran. Not measured on CPUs.",
    ),
    ("c", "Draft time of an iteration / (K x plain step): what one drafted position costs, in plain steps."),
    ("v", "Verification of an iteration / plain step, at the same batch size and context."),
    ("o", "Everything outside the target's forward and the draft, per iteration / plain step."),
    ("Cost model", "Speedup = tau / (v + K c + o)."),
    ("Ideal speedup", "tau / (1 + K c): if verifying cost no more than one plain step and nothing else took time."),
    (
        "Predicted",
        "The cost model with c, v, o and acceptance of a calibration pass on other prompts. Error: predicted / "
        "measured - 1.",
    ),
    (
        "Greedy, one-hot, probabilistic",
        "Greedy: temperature 0. One-hot: the target samples, the draft proposes its first choice. Probabilistic: the "
        "draft samples from its own distribution. All three keep the target's output distribution.",
    ),
    (
        "Lossy",
        "Typical acceptance keeps drafts that the target finds plausible, not only those its distribution allows: the "
        "text is no longer the target's, so such a run is no headline and proves nothing about losslessness.",
    ),
    (
        "Synthetic",
        "Drafts accepted at rates set beforehand, whatever they say. The text is meaningless; the times are those of a "
        "draft that good.",
    ),
)


# What engines count otherwise: instead of the entry of the same name.
ENGINE_GLOSSARY = {
    "Mean acceptance length (tau)": "1 + accepted tokens / draft rounds, as the engine counts: rounds that drafted "
    "nothing are left out, so where lookup finds nothing to draft it is higher than tokens per target pass.",
    "Per-position acceptance": "At position i: rounds in which the first i drafts were all accepted / draft rounds. "
    "Joint, so it never rises with i, and tau is 1 + its sum.",
    "Speedup": "Pooled decode tokens/s over that of the engine's plain decoding of the same prompts, stop tokens "
    "ignored on both sides. Interval: 95%, bootstrap over prompts.",
}


def glossary(runs: Iterable[Run]) -> list[tuple[str, str]]:
    """(name, definition) of every figure, as these runs count it."""
    by_rounds = any(run.get("denominator") == "draft_rounds" for run in runs)
    return [(name, ENGINE_GLOSSARY.get(name, text) if by_rounds else text) for name, text in GLOSSARY]


def warnings(report: Mapping[str, Any], groups: list[Group]) -> list[dict[str, str]]:
    """What a reader must know before believing a figure: each {"level": bad | warn | info, "title", "text"}."""
    runs = [run for group in groups for run in group.rows]
    found = [*_interrupted(report), *_impossible(runs), *_marked(runs), *_slower(groups)]
    prompts = report.get("prompts") or {}
    repeated = prompts.get("repeated_8gram_share")
    if repeated is not None and repeated > REPETITION_NOTE_ABOVE:
        text = (
            f"{percent(repeated)} of the generated positions repeat an 8-gram that the same text already holds. "
            "Looping text is easy to guess: it raises the acceptance of every draft, and most of all of n-gram lookup, "
            "whose only skill is to copy. Greedy figures flatter here; read the sampled ones, or use a target that "
            "does not loop."
        )
        found.append({"level": "warn", "title": "The text repeats itself", "text": text})
    overlap = prompts.get("train_overlap")
    if overlap is not None and overlap > OVERLAP_NOTE_ABOVE:
        text = (
            f"{percent(overlap)} of the prompts share a 13-gram, or the whole text, with the training data. Acceptance "
            "on them says less about new text; take prompts that were held out."
        )
        found.append({"level": "warn", "title": "Prompts overlap with the training data", "text": text})
    notes = [*(report.get("notes") or ()), *(f"{run['label']}: {note}" for run in runs for note in run["notes"] or ())]
    return found + [{"level": "info", "title": "Note", "text": note} for note in dict.fromkeys(notes)]


def _interrupted(report: Mapping[str, Any]) -> list[dict[str, str]]:
    if not report.get("interrupted"):
        return []
    prompts = report.get("prompts") or {}
    count, asked = prompts.get("count"), prompts.get("requested")
    done = "some" if count is None else f"{count}"
    text = f"{done} of the {f'{asked} ' if asked else ''}prompts are in these figures"
    reason = f" ({report['interruption']})" if report.get("interruption") else ""
    return [{"level": "bad", "title": "Interrupted", "text": f"{text}{reason}; the rest was not measured."}]


def _impossible(runs: Iterable[Run]) -> list[dict[str, str]]:
    labels = sorted({run["label"] for run in runs if is_impossible(run)})
    text = (
        f"{', '.join(labels)}: the speedup is above tau, the tokens gained per target pass. A draft cannot "
        "save more passes than that, so a clock, the baseline or the machine's drift is at fault. Measure again, "
        "interleaved."
    )
    return [{"level": "bad", "title": "Impossible speedup", "text": text}] if labels else []


def _marked(runs: Iterable[Run]) -> list[dict[str, str]]:
    texts = {
        "lossy": (
            "Lossy acceptance",
            "drafts are kept that the target's own distribution would refuse, so the text is not the target's.",
        ),
        "synthetic": (
            "Synthetic acceptance",
            "drafts are accepted at set rates whatever they say, so the text means nothing and only the times count.",
        ),
    }
    found = []
    for mark, (title, text) in texts.items():
        labels = sorted({series_label(run) for run in runs if mark_of(run) == mark})
        if labels:
            text = (
                f"{', '.join(labels)}: {text} Not in the headline, not among the best, not covered by the certificate."
            )
            found.append({"level": "warn", "title": title, "text": text})
    return found


def _slower(groups: Iterable[Group]) -> list[dict[str, str]]:
    """Trained drafts that lose to plain decoding at every K that was measured, and what an iteration of them costs."""
    lines = []
    for group in groups:
        best: dict[str, dict] = {}
        for run in group.runs:
            if is_trained_draft(run) and not mark_of(run) and run.get("speedup") is not None:
                label = series_label(run)
                best[label] = max(best.get(label, run), run, key=lambda one: one["speedup"])
        lines += [
            f"{label} {run['speedup']:.2f}× ({_lower(group.title)}{_costs(run)})"
            for label, run in best.items()
            if run["speedup"] < 1
        ]
    text = f"At every measured K: {', '.join(lines)}. Serve without a draft there."
    return [{"level": "warn", "title": "Slower than plain decoding", "text": text}] if lines else []


def _costs(run: Mapping[str, Any]) -> str:
    """Why a run is no faster: what its iteration brings against what it costs, in plain steps; empty where unknown."""
    c, v, o = (run.get(name) for name in ("c", "v", "o"))
    if c is None or v is None or o is None:
        return ""
    return (
        f": at K = {run['k']} an iteration brings {run['mean_acceptance_length']:.2f} tokens and costs "
        f"{v + run['k'] * c + o:.2f} plain steps, {run['k'] * c:.2f} of them drafting"
    )


def _lower(title: str) -> str:
    return title[0].lower() + title[1:]


CHECK_NAME = re.compile(r"(exact|fixed|recorded)_(chain|tree)_(one_hot|probabilistic)(?:_(first|joint))?")
CHECK_WORDS = {
    "greedy": (
        "Greedy decoding",
        "At temperature 0 the verification emits the target's own first choices and nothing else, for random chains, "
        "random trees and the recorded logits.",
    ),
    "exact": (
        "Every case of a small language",
        "With three tokens, all drafts and a grid over all random numbers are tried out: each text of three tokens "
        "must come out exactly as often as the target alone would write it.",
    ),
    "fixed": (
        "Draws from known distributions",
        "{draws} texts are decoded in rounds of drafts, with temperature and top-k at work. Their first token, and "
        "their first two together, are held against the known frequencies by a chi-squared test.",
    ),
    "recorded": (
        "Draws from this target's own logits",
        "The same test where the target's distribution is what this target said after the first prompts: its likeliest "
        "tokens one by one, all others as one.",
    ),
    "": ("Other checks", ""),
}


def certificate_words(certificate: Mapping[str, Any]) -> dict[str, Any] | None:
    """The certificate as sections of the page; None where the report has none.

    {"passed", "count", "failed": [names], "line", "sections": [{"title", "claim", "rows": [{"name", "result",
    "passed"}]}], "control"}.
    """
    if not certificate:
        return None
    checks = {name: check for name, check in (certificate.get("checks") or {}).items() if isinstance(check, Mapping)}
    draws, level = certificate.get("draws"), certificate.get("significance")
    sections: dict[str, list] = {}
    for name, check in checks.items():
        match = CHECK_NAME.fullmatch(name)
        kind = name if name == "greedy" else match[1] if match else ""
        row = {"name": _check_title(name), "result": _check_result(check), "passed": check.get("passed") is True}
        sections.setdefault(kind, []).append(row)
    control = certificate.get("control") or {}
    failed = [name for name, check in checks.items() if check.get("passed") is not True]
    passed = certificate.get("passed") is True
    words = {"passed": passed, "count": len(checks), "failed": failed, "control_passed": control.get("passed") is True}
    return {
        **words,
        "line": _certificate_line(words),
        "sections": [
            {"title": title, "claim": claim.format(draws=f"{draws:,}" if draws else "Many"), "rows": sections[kind]}
            for kind, (title, claim) in CHECK_WORDS.items()
            if kind in sections
        ],
        "control": _control_words(control),
        "significance": None if level is None else f"{level:g}",
        "seconds": certificate.get("seconds"),
    }


def _certificate_line(words: Mapping[str, Any]) -> str:
    """As the terminal prints it."""
    if words["passed"]:
        return f"passed ({words['count']} checks, control failed as it must)"
    parts = [f"{', '.join(words['failed'])} of {words['count']} checks"] if words["failed"] else []
    parts += [] if words["control_passed"] else ["the control, a wrong sampler, was not found out"]
    return f"FAILED ({'; '.join(parts) or 'see report.json'})"


def _check_title(name: str) -> str:
    match = CHECK_NAME.fullmatch(name)
    if not match:
        return "every row" if name == "greedy" else name.replace("_", " ")
    part = {"first": ", first token", "joint": ", two tokens", None: ""}[match[4]]
    return f"{match[2]}, {match[3].replace('_', '-')} drafts{part}"


def _check_result(check: Mapping[str, Any]) -> str:
    if check.get("p_value") is not None:
        return f"p {p_text(check['p_value'])}"
    if check.get("wrong_rows") is not None:
        return f"{check['wrong_rows']} rows differ"
    if check.get("largest_error") == 0:
        return "no difference"
    if check.get("largest_error") is not None:
        allowed = f", allowed {check['tolerance']:g}" if check.get("tolerance") else ""
        return f"largest error {check['largest_error']:.1e}{allowed}"
    return ""


def p_text(value: float) -> str:
    """A p-value with its sign: fp64 has no word for the smallest ones."""
    return "< 1e-300" if value < 1e-300 else f"= {value:.2g}"


def _control_words(control: Mapping[str, Any]) -> str:
    if not control:
        return "No control was run, so nothing shows that the checks can fail."
    p_value, shares = control.get("p_value"), control.get("first_token")
    seen = "" if p_value is None else f" (p {p_text(p_value)})"
    if control.get("passed") is not True:
        return (
            f"A deliberately wrong sampler, which after a refusal draws from p instead of the residual, was NOT found "
            f"out{seen}: the checks above cannot tell right from wrong."
        )
    known = FIXED_P[0]
    told = ""
    if shares:
        told = f": its first tokens came with frequencies {_shares(shares[: len(known)])} instead of {_shares(known)}"
    return (
        "A deliberately wrong sampler, which after a refusal draws from p instead of the residual, failed the same "
        f"test as it must{seen}{told}."
    )


def _shares(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
