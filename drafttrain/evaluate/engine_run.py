"""`drafttrain evaluate --engine`: a run's or a draft folder's report as a serving engine gives it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat_template import Chat
from drafttrain.data.engine_process import check_python
from drafttrain.data.progress import progress_bar
from drafttrain.drafts.loading import draft_method, find_draft
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.engine_settings import VLLM_METHODS
from drafttrain.evaluate.engines import ROOM, EngineDraft, EngineError, evaluate_server, evaluate_vllm
from drafttrain.evaluate.prompt_sets import load_prompt_set, prompt_tokens
from drafttrain.evaluate.run import gather_prompts, load_prompts, samplings_of, with_chat
from drafttrain.evaluate.runner import Prompt
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import EvaluationConfig, Recipe
from drafttrain.specdec.decode import generate
from drafttrain.target import Target, load_tokenizer

NGRAM = EngineDraft("ngram")


@dataclass(frozen=True)
class _Reader:
    """As much of a target as turning prompts into ids needs: a server's weights are not loaded a second time."""

    name: str
    tokenizer: PreTrainedTokenizerBase


def evaluate_served(
    url: str,
    source: str | Path,
    tokenizer_of: str | Path,
    settings: EvaluationConfig,
    *,
    baseline_url: str | None = None,
    engine: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    recipe: Recipe | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The report of a server that runs the draft `source`, at the one temperature and concurrency of the settings.

    Prompts become ids here, with the tokenizer of the target `tokenizer_of` (hub id, folder or .gguf file): those of
    evaluation.prompts, the recipe's data.test or the built-in set; of conversations only the first turn is asked.
    """
    kind = draft_method(find_draft(source))
    reader = _Reader(str(tokenizer_of), load_tokenizer(str(tokenizer_of)))
    chat = Chat.of(recipe)
    if recipe and recipe.data.test and not settings.prompts:
        name = "test"
        prompts = load_prompts(recipe.data.test, reader, chat, settings.num_prompts, settings.seed, say)
    else:
        name = settings.prompts or "builtin"
        rows = load_prompt_set(name, settings.num_prompts, settings.seed)
        prompts = [Prompt(tuple(prompt_tokens(row, reader, chat)), row.category, row.id) for row in rows]
    say(f"asking {url}: {len(prompts)} prompts, {settings.concurrency[0]} at a time, stop tokens ignored")
    with progress_bar("asking", len(prompts) * (2 if baseline_url else 1)) as update:
        report = evaluate_server(
            url,
            prompts,
            baseline_url=baseline_url,
            draft=kind,
            engine=engine,
            model=model,
            api_key=api_key,
            checkpoint=str(source),
            max_new_tokens=settings.max_new_tokens,
            concurrency=settings.concurrency[0],
            sampling=samplings_of(settings)[0],
            name=name,
            progress=update,
        )
    return with_chat(report, reader.tokenizer, recipe, [source])


def evaluate_in_vllm(
    source: str | Path,
    target: Target,
    settings: EvaluationConfig,
    *,
    python: Path,
    model_impl: str = "auto",
    recipe: Recipe | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The report of vLLM run by the interpreter `python`, at the one temperature and concurrency of the settings.

    Greedy text is compared with our own plain decoding; the target leaves the device before vLLM starts. EngineError
    where there is no such interpreter, and for drawn drafts of Medusa heads.
    """
    check_python(python, "or --engine-python PATH")
    folder = find_draft(source)
    method = VLLM_METHODS[draft_method(folder)]
    sampling = samplings_of(settings)[0]
    ks = list(settings.k) if method != "medusa" else _of_heads(folder, settings.k, sampling, say)
    name, gathered = gather_prompts(settings, recipe, target, say)
    room = target.max_positions - settings.max_new_tokens - max(ks) - ROOM
    prompts = [prompt for prompt in gathered if len(prompt.ids) <= room]
    if len(prompts) < len(gathered):
        say(f"left out: {len(gathered) - len(prompts)} prompts of more than {room} tokens")
    drafts = [EngineDraft(method, folder), *([NGRAM] if settings.ngram else [])]
    plain = None
    if sampling.greedy:
        say(f"our own plain decoding of {len(prompts)} prompts, to compare the text with")
        options = {"max_new_tokens": settings.max_new_tokens, "stop_ids": ()}
        plain = [generate(target, [prompt.ids], **options).generations[0].tokens for prompt in prompts]
    if target.device.type == "cuda":
        target.captured.clear()
        target.model.to("cpu")
        torch.cuda.empty_cache()
    count = 1 + len(drafts) * len(ks)
    say(f"vLLM: {len(prompts)} prompts x {count} configurations, a process for each, stop tokens ignored")
    with progress_bar("asking", len(prompts) * count) as update:
        report = evaluate_vllm(
            python,
            target.folder or target.name,
            drafts,
            prompts,
            k=ks,
            max_new_tokens=settings.max_new_tokens,
            concurrency=settings.concurrency[0],
            sampling=sampling,
            model_impl=model_impl,
            name=name,
            target_name=target.title,
            fingerprint=target.fingerprint,
            plain_tokens=plain,
            training_rows=training_rows,
            progress=update,
        )
    return with_chat(report, target.tokenizer, recipe, [source])


def _of_heads(folder: Path, ks: Sequence[int], sampling: Sampling, say: Callable[[str], None]) -> list[int]:
    """The K that the heads in a folder can draft, or all of the heads. EngineError where drafts are to be drawn."""
    if sampling.draws_drafts:
        raise EngineError(
            "draft_mode is probabilistic; vLLM always drafts the likeliest word of each Medusa head, whatever it is "
            "told. Mend: --draft-mode one_hot"
        )
    heads = MedusaConfig.load(folder).num_heads
    kept = [k for k in ks if k <= heads] or [heads]
    if kept != list(ks):
        say(f"the draft has {heads} heads: K is {', '.join(map(str, kept))}")
    return kept
