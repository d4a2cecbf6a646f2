"""`drafttrain evaluate`: a run or a draft made elsewhere, on test prompts, against n-gram lookup and its untrained
self.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drafttrain.data.conversations import load_conversations
from drafttrain.data.prepare import conversation_prompt
from drafttrain.data.progress import progress_bar
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.base import Draft
from drafttrain.drafts.loading import load_draft
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.runner import NGRAM, Candidate, Prompt, configurations, evaluate
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import DataEntry, EvaluationConfig, Recipe
from drafttrain.target import Target


def load_prompts(entries: Sequence[DataEntry], target: Target, chat: str, count: int, seed: int) -> list[Prompt]:
    """The first `count` prompts of data entries: each conversation up to the target's first answer."""
    conversations = load_conversations(entries, seed)[:count]
    return [Prompt(tuple(conversation_prompt(one, target, chat))) for one in conversations]


def evaluate_draft(
    source: str | Path,
    target: Target,
    settings: EvaluationConfig,
    *,
    recipe: Recipe | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The report of one draft folder, run or hub id. Prompts: evaluation.prompts, or the recipe's data.test.

    Raises EvaluationError when there are no prompts, DraftError when the draft does not fit the target.
    """
    entries = [DataEntry(path=settings.prompts)] if settings.prompts else list(recipe.data.test if recipe else [])
    if not entries:
        raise EvaluationError(
            "no prompts to evaluate on: neither --prompts nor data.test is given. Mend: --prompts FILE.jsonl with "
            'rows {"prompt": ...} or {"messages": [...]}'
        )
    chat = recipe.data.chat if recipe else "auto"
    prompts = load_prompts(entries, target, chat, settings.num_prompts, settings.seed)
    draft = load_draft(source, target)
    candidates = _draft_candidates(draft, source, target, settings)
    samplings = [
        Sampling(temperature, settings.top_p, settings.top_k, settings.seed, settings.draft_mode)
        for temperature in settings.temperature
    ]
    count = len(configurations(candidates, settings.k, samplings))
    say(f"evaluating {len(prompts)} prompts x {count} configurations, interleaved prompt by prompt")
    with progress_bar("evaluating", len(prompts) * count) as update:
        return evaluate(
            target,
            candidates,
            prompts,
            k=settings.k,
            samplings=samplings,
            max_new_tokens=settings.max_new_tokens,
            ngram=False,
            name=Path(entries[0].path or entries[0].dataset).stem,
            training_rows=training_rows,
            recipe=recipe.model_dump(mode="json") if recipe else None,
            progress=update,
        )


def _draft_candidates(draft: Draft, source, target: Target, settings: EvaluationConfig) -> list[Candidate]:
    """n-gram lookup, the untrained draft (at one K, greedy where that is measured: it only marks the floor), the
    draft.
    """
    candidates = [NGRAM] if settings.ngram else []
    untrained = RunFolder(Path(source)).untrained
    if settings.untrained and untrained.exists():
        fresh = load_draft(untrained, target)
        ks = sorted(settings.k)
        candidates.append(
            Candidate(
                f"untrained {draft.method}",
                draft.method,
                lambda: fresh.proposer(target),
                trained=False,
                checkpoint=str(untrained),
                ks=(ks[len(ks) // 2],),
                greedy_only=True,
            )
        )
    return [*candidates, Candidate(draft.method, draft.method, lambda: draft.proposer(target), True, str(source))]


def settings_with(settings: EvaluationConfig, **changes: Any) -> EvaluationConfig:
    """The evaluation settings with the given ones replaced; None leaves a setting as it is."""
    return settings.model_copy(update={name: value for name, value in changes.items() if value is not None})
