"""`drafttrain check`: would an engine serve a draft as it was trained? Each loader is simulated, none is run: names,
shapes, ids, flags and defaults, by check_engines.TABLE. Drafts of SafeAILab, SpecForge and speculators are taken too.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.eagle3_files import is_eagle3
from drafttrain.drafts.medusa_config import ARCHITECTURE as MEDUSA
from drafttrain.drafts.medusa_config import SEQUENTIAL
from drafttrain.export import check_eagle3, check_medusa, check_small
from drafttrain.export.base import ExportError
from drafttrain.export.check_engines import ENGINES, LLAMA_CPP_HOOKLESS, REFUSED, SGLANG_HOOKS, consequence
from drafttrain.export.check_files import Finding, StoredDraft, TargetFacts
from drafttrain.export.serve import lacks_hooks
from drafttrain.recipe_rules import ENGINES as SERVED

PASS, FAIL, UNSUPPORTED = "PASS", "FAIL", "UNSUPPORTED"
STYLES = {PASS: "green", FAIL: "bold red", UNSUPPORTED: "yellow"}
TITLES = {"eagle3": "an EAGLE-3 draft", "medusa": "Medusa heads", "kd": "a small draft model"}


@dataclass(frozen=True)
class EngineFinding:
    """What was found, what the engine would do with it, and the mend."""

    code: str
    found: str
    would: str
    mend: str


@dataclass
class Verdict:
    """PASS, FAIL or UNSUPPORTED for one engine; notes: what to know although it passes."""

    engine: str
    verdict: str
    findings: list[EngineFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class CheckReport:
    """Of one draft: method (eagle3, medusa or kd), layout (who wrote it), and a verdict for each engine asked for."""

    draft: str
    target: str
    method: str
    layout: str
    engines: list[Verdict]
    exit_status: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_draft(name_or_path: str | Path, target: str | TargetFacts, engine: str = "all") -> CheckReport:
    """Check a draft folder, run folder or hub id against a target, whose weights are not needed.

    engine: all, or one or more of vllm, sglang, tensorrt-llm, llama.cpp and transformers, with commas between.
    exit_status 0: each of them serves the draft as it was trained; with all, those that serve its kind, and at least
    one does. Raises DraftError and TargetError where a folder cannot be read, ExportError for an unknown engine.
    """
    named = [] if engine == "all" else [name.strip() for name in engine.split(",")]
    unknown = [name for name in named if name not in ENGINES]
    if unknown:
        raise ExportError(f"--engine is {unknown[0]!r}, expected all or some of {', '.join(ENGINES)}")
    draft = StoredDraft.open(name_or_path)
    facts = target if isinstance(target, TargetFacts) else TargetFacts.read(target)
    method = method_of(draft)
    checks = {"eagle3": check_eagle3.check, "medusa": check_medusa.check, "kd": check_small.check}
    findings = list(checks[method](draft, facts))
    verdicts = [_verdict(name, method, findings, draft, facts) for name in named or ENGINES]
    kinds = [verdict.verdict for verdict in verdicts]
    fine = FAIL not in kinds and PASS in kinds and not (named and UNSUPPORTED in kinds)
    return CheckReport(str(draft.folder), facts.name, method, _layout(method, draft, facts), verdicts, 0 if fine else 1)


def method_of(draft: StoredDraft) -> str:
    """eagle3, medusa or kd, by the tensors where the config does not say. DraftError for anything else."""
    config, names = draft.config, draft.headers.keys()
    architectures = config.get("architectures") or [""]
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise DraftError(f"{draft.folder}: speculators_model_type is {kind!r}. Expected eagle3. Mend: another draft.")
    medusa = config.get("model_type") == "medusa" or "medusa_num_heads" in config
    if medusa or architectures[0] in (MEDUSA, SEQUENTIAL) or any(check_medusa.ORIGINAL_BLOCK.match(n) for n in names):
        return "medusa"
    if any(check_medusa.BLOCK.match(name) for name in names):
        return "medusa"
    heads = any(name.endswith("fc.weight") for name in names) and any("hidden_norm" in name for name in names)
    if is_eagle3(config) or heads:
        return "eagle3"
    if any(name.startswith("model.layers.") for name in names) or architectures[0].endswith("ForCausalLM"):
        return "kd"
    raise DraftError(
        f"{draft.folder}: architectures is {config.get('architectures')} and the first tensors are "
        f"{', '.join(sorted(names)[:3])}. Expected an EAGLE-3 draft, Medusa heads or a causal language model. Mend: "
        "give a draft checkpoint."
    )


def _layout(method: str, draft: StoredDraft, target: TargetFacts) -> str:
    if method == "eagle3":
        return check_eagle3.Eagle3View(draft, target).layout
    if method == "medusa":
        return check_medusa.MedusaView(draft, target).layout
    return "transformers"


def _verdict(engine: str, method: str, findings: Iterable[Finding], draft: StoredDraft, target: TargetFacts) -> Verdict:
    refusal = _refusal(engine, method, target)
    if refusal is not None:
        return Verdict(engine, UNSUPPORTED, [refusal])
    faults, refused = [], []
    for finding in findings:
        would = consequence(method, finding.code, engine)
        if would is None or (finding.engines is not None and engine not in finding.engines):
            continue
        here = EngineFinding(finding.code, finding.found, would, finding.mend)
        (refused if finding.code in REFUSED else faults).append(here)
    if refused:
        return Verdict(engine, UNSUPPORTED, refused)
    return Verdict(engine, FAIL if faults else PASS, faults, list(_notes(engine, method, draft, target)))


def _refusal(engine: str, method: str, target: TargetFacts) -> EngineFinding | None:
    """Why the engine serves no such draft, or no draft of that kind for this target."""
    others = ", ".join(name for name in SERVED[method] if name != engine)
    if engine not in SERVED[method]:
        return EngineFinding("method", TITLES[method], "serves no such drafts", f"serve it with {others}")
    if method != "eagle3":
        return None
    hookless = (engine == "sglang" and target.model_type not in SGLANG_HOOKS) or (
        engine == "llama.cpp" and target.model_type in LLAMA_CPP_HOOKLESS
    )
    if not hookless:
        return None
    found = f"a target of model_type {target.model_type}"
    return EngineFinding("target-family", found, "captures no features of this family", f"serve it with {others}")


def _notes(engine: str, method: str, draft: StoredDraft, target: TargetFacts) -> Iterable[str]:
    if engine == "vllm" and lacks_hooks(method, target.model_type):
        yield f"vLLM's own {target.model_type} has no EAGLE-3 hooks: serve with --model-impl transformers"
    if engine == "vllm" and method == "eagle3":
        yield 'give "method": "eagle3": without it vLLM guesses from the path'
    if engine == "vllm" and method == "medusa" and "token_map" in draft.headers:
        yield "vLLM 0.32 takes token_map for a weight that was not loaded: enable_weights_track false"
    if engine == "vllm" and method == "kd" and target.sliding:
        yield "vLLM 0.32 wants one cache group: serve with --disable-hybrid-kv-cache-manager"
    stored = draft.float_dtypes
    if engine in ("vllm", "sglang") and target.dtype and len(stored) == 1 and target.dtype not in stored:
        yield f"the draft, stored in {next(iter(stored))}, is cast to the target's {target.dtype}"
    if engine == "sglang" and method == "eagle3":
        yield "start it as EAGLE3: as EAGLE it serves at an acceptance length of 1.0 without an error"
    if engine == "tensorrt-llm" and method == "eagle3":
        yield f"whether it captures features of {target.model_type} is not known here"
    ids = (draft.config.get("eagle_aux_hidden_state_layer_ids") or []) if method == "eagle3" else []
    defaults = [2, target.num_layers // 2, target.num_layers - 3]
    if engine == "llama.cpp" and ids and ids != defaults:
        yield f"a converter that does not read the layer ids writes {defaults}; the GGUF must name {ids}"
    made_for = draft.facts.get("target_fingerprint")
    if made_for and target.fingerprint and made_for != target.fingerprint:
        yield f"made for {draft.facts.get('target')}, whose files are others than those of {target.name}"
    if engine in ("vllm", "sglang") and (draft.folder / "draft_ids.json").exists():
        yield "the smaller draft vocabulary in draft_ids.json is not read: every word is drafted"


def report_table(report: CheckReport) -> Group:
    """For people: a line for each engine, and below it what was found, what the engine would do, and the mend."""
    title = f"{report.draft}: {TITLES[report.method]} ({report.layout}) for {report.target}"
    lines: list[Any] = [Text(title, style="bold")]
    for verdict in report.engines:
        lines.append(Text.assemble((f"{verdict.verdict:<12}", STYLES[verdict.verdict]), verdict.engine))
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for finding in verdict.findings:
            body = Text.assemble(finding.found, f"\n{verdict.engine} {finding.would}", f"\nMend: {finding.mend}")
            table.add_row(finding.code, body)
        for note in verdict.notes:
            table.add_row("note", Text(note, style="dim"))
        if table.row_count:
            lines.append(table)
    return Group(*lines)


def last_line(report: CheckReport) -> str:
    """Which engines serve it, which do not, and what to do next."""
    by = {kind: [v.engine for v in report.engines if v.verdict == kind] for kind in STYLES}
    told = "; ".join(f"{kind}: {', '.join(engines)}" for kind, engines in by.items() if engines)
    if by[PASS] and not by[FAIL]:
        return f"{told}. Next: drafttrain serve-check {report.draft} --target {report.target}"
    return f"{told}. Next: mend what is named above and check again"
