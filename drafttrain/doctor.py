"""`drafttrain doctor`: why is acceptance low? Measured checks of a run or a draft from elsewhere, each PASS, FAIL
or NOT MEASURED with its evidence and mend. `drafttrain check` simulates engines' loaders; this measures what is
served here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from drafttrain import doctor_data, doctor_draft, doctor_speed, doctor_spread, doctor_steps, doctor_target
from drafttrain.data.conversations import DataError
from drafttrain.doctor_case import FAIL, NOT_MEASURED, PASS, Case, Result, Unmeasured
from drafttrain.errors import UserError
from drafttrain.recipe import Recipe
from drafttrain.target import Target

CHECKS: dict[str, tuple[str, Callable[[Case], Result]]] = {
    "fingerprint": ("target, tokenizer and template are those of training", doctor_target.fingerprint),
    "dtype": ("dtype and quantisation of the target are those of training", doctor_target.dtype),
    "template": ("chat template, headers and BOS", doctor_data.template),
    "mask": ("share of supervised tokens", doctor_data.mask),
    "thinking": ("reasoning in training and in evaluation", doctor_data.thinking),
    "drift": ("evaluation texts are like the training texts", doctor_spread.drift),
    "context": ("acceptance by position, and the trained length", doctor_spread.context),
    "vocabulary": ("draft vocabulary against what the target writes", doctor_spread.vocabulary),
    "layers": ("feature layers", doctor_draft.layers),
    "norm": ("states in front of the final norm", doctor_draft.norm),
    "rope": ("rotary positions", doctor_draft.rope),
    "steps": ("from step 1 to step k", doctor_steps.steps),
    "parity": ("drafts as it was trained to", doctor_steps.parity),
    "speed": ("faster than plain decoding", doctor_speed.speed),
}
STYLES = {PASS: "green", FAIL: "bold red", NOT_MEASURED: "yellow"}
DATA = ("fingerprint", "dtype", "template", "mask", "thinking", "drift", "context", "vocabulary")
EXPORTED = ("layers", "norm", "rope", "parity")


class DoctorError(UserError):
    """A check that does not exist, or nothing to look at."""


@dataclass
class Diagnosis:
    """Results by check, in order; exit_status 1 where one failed."""

    draft: str
    target: str
    method: str | None
    results: dict[str, Result]

    @property
    def failed(self) -> list[str]:
        return [name for name, result in self.results.items() if result.status == FAIL]

    @property
    def exit_status(self) -> int:
        return 1 if self.failed else 0

    def to_json(self) -> dict[str, Any]:
        checks = {
            name: {"title": CHECKS[name][0], "status": one.status, "evidence": list(one.evidence), "mend": one.mend}
            | {"numbers": one.numbers}
            for name, one in self.results.items()
        }
        facts = {"draft": self.draft, "target": self.target, "method": self.method}
        return {**facts, "checks": checks, "failed": self.failed, "exit_status": self.exit_status}


def names_of(only: str | None) -> list[str]:
    """The checks of a list with commas between, in the order of CHECKS; all without one. DoctorError for an unknown."""
    if only is None:
        return list(CHECKS)
    asked = [name.strip() for name in only.split(",")]
    for name in asked:
        if name not in CHECKS:
            near = get_close_matches(name, CHECKS, n=1)
            mend = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(CHECKS)}"
            raise DoctorError(f"--only is {name!r}; {mend}")
    return [name for name in CHECKS if name in asked]


def diagnose(
    source: str | Path,
    target: Target,
    recipe: Recipe | None = None,
    *,
    only: Sequence[str] = tuple(CHECKS),
    samples: int = 8,
    say: Callable[[str], None] = print,
) -> Diagnosis:
    """Make the checks `only` of a run folder, draft folder or hub id on its loaded target; nothing is written.

    recipe: the run's; None: a draft from elsewhere, of which no training data is known. samples: prompts that the
    target answers, plain and with the draft. DraftError where no draft is found; one that does not load is a finding.
    """
    if samples < 1:
        raise DoctorError(f"--samples is {samples}; expected at least 1 prompt")
    case = Case(source, target, recipe, samples, say)
    results: dict[str, Result] = {}
    for name in only:
        try:
            results[name] = CHECKS[name][1](case)
        except (Unmeasured, DataError) as error:
            results[name] = Result(NOT_MEASURED, (str(error),))
    method = None if case.loaded is None else case.loaded.method
    return Diagnosis(case.source, target.title, method, results)


def diagnosis_table(found: Diagnosis) -> Group:
    """For people: each check with what was found, what is wrong first, and the mend."""
    lines: list[Any] = [
        Text(f"{found.draft}: {found.method or 'a draft that does not load'} for {found.target}", "bold")
    ]
    for name, result in found.results.items():
        style = STYLES[result.status]
        lines.append(Text.assemble((f"{result.status:<13}", style), (f"{name:<12}", "bold"), (CHECKS[name][0], "dim")))
        table = Table(box=None, show_header=False, padding=(0, 0, 0, 13), pad_edge=True)
        table.add_column(overflow="fold")
        for line in result.evidence:
            table.add_row(Text(line))
        if result.mend:
            table.add_row(Text(f"Mend: {result.mend}", "bold"))
        lines.append(table)
    return Group(*lines)


def last_line(found: Diagnosis, arguments: str, recipe: bool) -> str:
    """How many of each, and the next command. arguments: what names the draft in it; recipe: it is a run."""
    counts = [sum(one.status == status for one in found.results.values()) for status in STYLES]
    told = ", ".join(f"{count} {status}" for count, status in zip(counts, STYLES, strict=True) if count)
    failed = found.failed
    if not failed:
        after = "evaluate" if recipe else "check"
        return f"{told}. Next: drafttrain {after} {arguments}"
    first = failed[0]
    if first == "speed":
        command = f"drafttrain tune {arguments}"
    elif recipe and first in EXPORTED:
        command = f"drafttrain export {arguments}"
    elif recipe and first in DATA:
        command = f"the mend of {first}, then drafttrain train RECIPE --output NEW_FOLDER"
    else:
        command = "the first mend above"
    again = f"drafttrain doctor {arguments} --only {','.join(failed)}"
    return f"{told} ({', '.join(failed)}). Next: {command}, then {again}"
