"""`drafttrain evaluate` and `compare`: runs or drafts made elsewhere, on test prompts, against n-gram lookup and, for a
run, its untrained self.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drafttrain.data.chat_messages import RowError
from drafttrain.data.chat_template import AnyChat, Chat, chat_facts
from drafttrain.data.conversations import load_conversations
from drafttrain.data.prepare import conversation_prompt
from drafttrain.data.progress import progress_bar
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.base import Draft, Proposer, read_facts, tuned_facts
from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.loading import find_draft, load_draft
from drafttrain.evaluate.cpu_speed import bf16_note
from drafttrain.evaluate.prompt_sets import expand_turns, load_prompt_set
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.runner import NGRAM, Candidate, Prompt, configurations, evaluate
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree, StaticTree, Tree
from drafttrain.recipe import DataEntry, EvaluationConfig, Recipe, TreeConfig, parse_evaluation
from drafttrain.specdec.decode import generate
from drafttrain.specdec.policy import Costs, Policy, parse_policy
from drafttrain.specdec.verify import Synthetic, Typical
from drafttrain.target import Target


def load_prompts(
    entries: Sequence[DataEntry],
    target: Target,
    chat: AnyChat,
    count: int,
    seed: int,
    say: Callable[[str], None] = print,
) -> list[Prompt]:
    """The first `count` prompts of data entries: each conversation up to the target's first answer. Those that the chat
    template refuses are left out and counted; DataError where it refuses all of them.
    """
    prompts, refused = [], []
    for one in load_conversations(entries, seed)[:count]:
        try:
            prompts.append(Prompt(tuple(conversation_prompt(one, target, chat))))
        except RowError as error:
            refused.append(error)
    if refused and not prompts:
        raise refused[0]
    if refused:
        say(f"left out: {len(refused)} prompts, the first: {refused[0]}")
    return prompts


def named_prompts(
    name: str,
    target: Target,
    chat: AnyChat,
    count: int,
    seed: int,
    max_new_tokens: int,
    say: Callable[[str], None] = print,
) -> list[Prompt]:
    """Prompts of a named set or a file (evaluate/prompt_sets.py), one for each turn. A later turn sees the target's own
    greedy answer to the earlier ones. Those that leave no room for max_new_tokens are left out, and named.
    """
    room = target.max_positions - max_new_tokens + 1

    def answer(ids: list[int]) -> list[int]:
        if len(ids) > room:
            return []  # The later turns are longer still, and left out with this one.
        return generate(target, [ids], max_new_tokens=max_new_tokens).generations[0].tokens

    entries = expand_turns(load_prompt_set(name, count, seed), target, chat, answer)
    long = [f"{row.id} ({len(ids)} tokens)" for row, _, ids in entries if len(ids) > room]
    if long:
        say(f"left out, longer than the {room} tokens that fit {target.name}: {', '.join(long)}")
    return [Prompt(tuple(ids), row.category, row.id) for row, _, ids in entries if len(ids) <= room]


def gather_prompts(
    settings: EvaluationConfig, recipe: Recipe | None, target: Target, say: Callable[[str], None] = print
) -> tuple[str, list[Prompt]]:
    """(name, prompts): evaluation.prompts, else the recipe's data.test, else the built-in set."""
    chat = Chat.of(recipe)
    if settings.prompts or not (recipe and recipe.data.test):
        name = settings.prompts or "builtin"
        count, seed = settings.num_prompts, settings.seed
        prompts = named_prompts(name, target, chat, count, seed, settings.max_new_tokens, say)
        path = Path(name).expanduser()
        return (path.resolve().stem if path.exists() else name.replace(":", "-").replace(",", "-")), prompts
    entries = recipe.data.test
    prompts = load_prompts(entries, target, chat, settings.num_prompts, settings.seed, say)
    return Path(entries[0].path or entries[0].dataset).stem, prompts


def tree_of(settings: TreeConfig | None) -> Tree | None:
    """The tree that the settings describe; TreeError where they describe none."""
    if settings is None:
        return None
    return StaticTree.from_paths(settings.paths) if settings.paths else DynamicTree(settings.topk, settings.nodes)


def draft_candidates(
    label: str, draft: Draft, source: str | Path, target: Target, settings: EvaluationConfig
) -> list[Candidate]:
    """The draft as a chain, and beside it with the quantised weights, the tree and the policy that the settings ask
    for. EvaluationError for quantised weights of another draft than a small model.
    """
    plain = Candidate(label, draft.method, _maker(draft, target), True, str(source), ks=_depths(draft, settings))
    out = [plain]
    if settings.quantize and not isinstance(draft, KdDraft):
        raise EvaluationError(
            f"--quantize is for small models (method kd), and {label} is {draft.method}. Mend: leave it out"
        )
    for kind in settings.quantize:
        make = _maker(draft, target, quantize=kind)
        out.append(Candidate(f"{label} {kind}", draft.method, make, True, str(source), quantization=kind))
    tree = tree_of(settings.tree) or draft.tree
    if tree is not None:
        deep = tuple(k for k in settings.k if not isinstance(tree, StaticTree) or k <= tree.depth)
        deep = deep or (tree.depth,) if isinstance(tree, StaticTree) else deep
        make = partial(draft.proposer, target, tree)
        out.append(Candidate(label, draft.method, make, True, str(source), ks=deep, tree=tree))
    if settings.policy is not None:
        policy = policy_of(settings.policy, source, draft.method)
        longest = (max(plain.ks or settings.k),)
        out.append(Candidate(label, draft.method, plain.make, True, str(source), ks=longest, policy=policy))
    return out


def _depths(draft: Draft, settings: EvaluationConfig) -> tuple[int, ...]:
    """The K that a draft of bounded depth is run at; empty: all of the settings."""
    if draft.max_k is None or max(settings.k) <= draft.max_k:
        return ()
    return tuple(k for k in settings.k if k <= draft.max_k) or (draft.max_k,)


def _maker(draft: Draft, target: Target, **options) -> Callable[[], Proposer]:
    """What makes the draft's proposer for one configuration. Of a small model copies, so that its weights are cast,
    cut or quantised once for all of them: a proposer's state begins anew with each text.
    """
    if not isinstance(draft, KdDraft):
        return partial(draft.proposer, target, **options)
    return partial(copy.copy, draft.proposer(target, **options))


def policy_of(text: str, source: str | Path = "", label: str = "") -> Callable[[int], Policy]:
    """What makes a fresh policy for a run at a concurrency. goodput takes the costs that `drafttrain tune` left in the
    run folder `source` for the draft `label`; PolicyError without them, and for a text that names no policy.
    """
    factory = parse_policy(text)
    if text.strip() != "goodput":
        return lambda concurrency: factory(None)
    costs = tuned_costs(tune_folder(source) / "report.json", label)
    return lambda concurrency: factory(costs[min(costs, key=lambda rows: abs(rows - concurrency))] if costs else None)


def tune_folder(source: str | Path) -> Path:
    """Where `drafttrain tune` writes, and goodput looks, unless told otherwise: in a run's folder, else ./tune."""
    run = RunFolder(Path(source))
    return run.path / "evaluation" / "tune" if run.recipe_file.exists() else Path("tune")


def tuned_costs(path: Path, label: str) -> dict[int, Costs]:
    """{concurrency: costs} of a draft in a report of `drafttrain tune`; empty where there is none."""
    if not path.is_file():
        return {}
    costs = json.loads(path.read_text(encoding="utf-8")).get("tune", {}).get("costs", {})
    return {int(rows): Costs(**table[label]) for rows, table in costs.items() if label in table}


def samplings_of(settings: EvaluationConfig) -> list[Sampling]:
    """One for each temperature."""
    return [
        Sampling(temperature, settings.top_p, settings.top_k, settings.seed, settings.draft_mode)
        for temperature in settings.temperature
    ]


def evaluate_draft(
    source: str | Path,
    target: Target,
    settings: EvaluationConfig,
    *,
    recipe: Recipe | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    acceptance: Typical | Synthetic | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The report of one draft folder, run or hub id. Prompts: evaluation.prompts, the recipe's data.test or the
    built-in set. acceptance: a lossy rule to run beside the exact one.

    Raises EvaluationError when there are no prompts, DraftError when the draft does not fit the target.
    """
    draft = load_draft(source, target)
    candidates = [NGRAM] if settings.ngram else []
    untrained = RunFolder(Path(source)).untrained
    if settings.untrained and untrained.exists():
        candidates.append(_untrained(load_draft(untrained, target), untrained, target, settings))
    candidates += draft_candidates(draft.method, draft, source, target, settings)
    if acceptance is not None:
        make = partial(draft.proposer, target)
        candidates.append(Candidate(draft.method, draft.method, make, True, str(source), acceptance=acceptance))
    report = _measure(target, candidates, settings, recipe, training_rows, False, say, [source])
    tuned = tuned_facts(find_draft(source))
    if tuned:
        report["target"] |= {"name": f"{tuned['tuned_from']}, tuned with its Medusa heads", **tuned}
    return report


def compare_drafts(
    sources: Mapping[str, str | Path],
    target: Target,
    settings: EvaluationConfig,
    *,
    recipe: Recipe | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The report of several drafts of any kind on the same prompts, with paired differences ("comparisons")."""
    candidates = [NGRAM] if settings.ngram else []
    for label, source in sources.items():
        candidates += draft_candidates(label, load_draft(source, target), source, target, settings)
    return _measure(target, candidates, settings, recipe, training_rows, True, say, list(sources.values()))


def labels_of(sources: Sequence[str]) -> dict[str, str]:
    """{label: source}: the last part of each name, or more of it where two are alike. EvaluationError for one that is
    given twice.
    """
    twice = sorted({source for source in sources if sources.count(source) > 1})
    if twice:
        raise EvaluationError(f"{', '.join(twice)} is given twice. Expected different drafts to compare")
    parts = {source: Path(source).parts for source in sources}
    for length in range(1, 1 + max(map(len, parts.values()))):
        labels = {"/".join(path[-length:]): source for source, path in parts.items()}
        if len(labels) == len(sources):
            return labels
    return {source: source for source in sources}


def asked_otherwise(sources: Sequence[str | Path], chat: Chat) -> list[str]:
    """A note for each draft that was trained with other switches of the chat template than it is measured with."""
    notes = []
    for source in sources:
        path = find_draft(source) / "drafttrain.json"
        trained = read_facts(path).get("chat_template_kwargs", {}) if path.exists() else {}
        if path.exists() and trained != chat.switches:
            here = f"prompts are asked with {dict(chat.switches) or 'none'}"
            notes.append(f"{source} was trained with chat_template_kwargs {trained or 'none'}; {here}")
    return notes


def with_chat(report: dict[str, Any], tokenizer, recipe: Recipe | None, sources: Sequence[str | Path]) -> dict:
    """The report, saying how prompts were asked and which drafts were trained otherwise."""
    chat = Chat.of(recipe)
    notes = asked_otherwise(sources, chat)
    report["provenance"]["chat"] = chat_facts(tokenizer, chat)
    return {**report, "notes": [*report.get("notes", []), *notes]} if notes else report


def _measure(
    target, candidates, settings: EvaluationConfig, recipe, training_rows, compare: bool, say, sources
) -> dict[str, Any]:
    name, prompts = gather_prompts(settings, recipe, target, say)
    samplings = samplings_of(settings)
    if any(isinstance(c.tree, DynamicTree) for c in candidates) and any(s.draws_drafts for s in samplings):
        say("dynamic trees are left out where drafts are drawn: their children are chosen by probability")
    count = len(configurations(candidates, settings.k, samplings)) * settings.repeats
    total = sum(count * -(-len(prompts) // rows) for rows in set(settings.concurrency))
    say(f"evaluating {len(prompts)} prompts x {count * len(set(settings.concurrency))} configurations, interleaved")
    slow = bf16_note(target.device, target.dtype)
    for note in (*asked_otherwise(sources, Chat.of(recipe)), *([slow] if slow else [])):
        say(f"note: {note}")
    with progress_bar("evaluating", total) as update:
        report = evaluate(
            target,
            candidates,
            prompts,
            k=settings.k,
            samplings=samplings,
            concurrency=settings.concurrency,
            repeats=settings.repeats,
            max_new_tokens=settings.max_new_tokens,
            ngram=False,
            name=name,
            training_rows=training_rows,
            recipe=recipe.model_dump(mode="json") if recipe else None,
            compare=compare,
            progress=update,
        )
    return with_chat(report, target.tokenizer, recipe, sources)


def _untrained(draft: Draft, folder: Path, target: Target, settings: EvaluationConfig) -> Candidate:
    """The draft before training, at one K, greedy where that is measured: it only marks the floor."""
    ks = sorted(_depths(draft, settings) or settings.k)
    return Candidate(
        f"untrained {draft.method}",
        draft.method,
        lambda: draft.proposer(target),
        trained=False,
        checkpoint=str(folder),
        ks=(ks[len(ks) // 2],),
        greedy_only=True,
    )


def settings_with(settings: EvaluationConfig, **changes: Any) -> EvaluationConfig:
    """The evaluation settings with the given ones replaced; None leaves a setting as it is. RecipeError names what is
    out of range.
    """
    return parse_evaluation({**settings.model_dump(), **{name: v for name, v in changes.items() if v is not None}})
