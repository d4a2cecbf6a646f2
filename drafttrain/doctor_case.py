"""What the checks of `drafttrain doctor` share, measured once and only when a check asks: rows, prompts, the target's
answers with and without the draft, and the texts of both with the target's hidden states. Nothing is written.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from drafttrain.data.chat_template import Chat
from drafttrain.data.conversations import DataError
from drafttrain.data.prepare import feature_layers, prepared_rows
from drafttrain.data.progress import progress_bar
from drafttrain.data.run_folder import RunFolder
from drafttrain.doctor_words import Texts, measured_layers, texts_of
from drafttrain.drafts.base import Draft, DraftError, read_facts
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.loading import MASTER, find_draft, load_draft
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.run import gather_prompts, settings_with
from drafttrain.evaluate.runner import Prompt
from drafttrain.evaluate.summary import Results
from drafttrain.export.kd import from_masters
from drafttrain.recipe import EvaluationConfig, Recipe
from drafttrain.specdec.decode import Generation, generate
from drafttrain.target import Target

PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "NOT MEASURED"
MOST_NEW_TOKENS, MOST_K, WARM_UP = 64, 5, 8
DOCUMENT_TOKENS, ROTATIONS = 2048, 2
MOST_ROWS = 2000
"""Rows whose tokens are looked through one by one."""
Problem = tuple[str, str]
"""What was found, and the one-line mend."""


@dataclass(frozen=True)
class Result:
    """Of one check. status: PASS, FAIL or NOT MEASURED; evidence: lines for people, what is wrong first; mend: one
    line where it failed; numbers: the figures behind it, for machines.
    """

    status: str
    evidence: tuple[str, ...]
    mend: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


class Unmeasured(Exception):
    """A check that cannot be made on this draft, or with what is at hand; its text says why."""


def verdict(problems: Sequence[Problem], evidence: Sequence[str], **numbers: Any) -> Result:
    """FAIL with every problem and its mend, or PASS where there is none."""
    mends = dict.fromkeys(mend for _, mend in problems)
    told = (*(found for found, _ in problems), *evidence)
    return Result(FAIL if problems else PASS, told, "; ".join(mends), numbers)


@dataclass
class Answers:
    """The target's greedy answers to the prompts: plain, and with the draft (None where it does not load)."""

    prompts: list[Prompt]
    plain: Results
    drafted: Results | None
    k: int

    def pairs(self) -> list[tuple[Prompt, Generation, Generation | None]]:
        drafted = self.drafted.generations if self.drafted else [None] * len(self.prompts)
        return list(zip(self.prompts, self.plain.generations, drafted, strict=True))


class Case:
    """A draft, its target, and its run where it is one.

    target: loaded as it will serve; recipe None: a draft from elsewhere, of which no training data is known; samples:
    prompts to answer, and rows to look at where the target has to read them.
    """

    def __init__(
        self,
        source: str | Path,
        target: Target,
        recipe: Recipe | None = None,
        samples: int = 8,
        say: Callable[[str], None] = print,
    ):
        self.source, self.target, self.recipe, self.samples, self.say = str(source), target, recipe, samples, say
        self.run = RunFolder(Path(source))
        self.folder = find_draft(source)
        self.refusal = ""
        try:
            self.loaded: Draft | None = load_draft(source, target)
        except DraftError as error:
            self.loaded, self.refusal = None, str(error)

    @property
    def draft(self) -> Draft:
        """The draft as it serves; Unmeasured where it does not load."""
        if self.loaded is None:
            raise Unmeasured(f"the draft does not load: {self.refusal}")
        return self.loaded

    @cached_property
    def facts(self) -> dict[str, Any]:
        """drafttrain.json beside the draft; empty for drafts from elsewhere."""
        path = self.folder / "drafttrain.json"
        return read_facts(path) if path.exists() else {}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Of the run's prepared data; empty where there is none."""
        path = self.run.prepared / "manifest.json"
        return json.loads(path.read_text(encoding="utf-8")) if self.recipe and path.exists() else {}

    @cached_property
    def rows(self) -> dict[str, list[dict]]:
        """Prepared rows of train and validation, as far as they are there."""
        found = {}
        for split in ("train", "validation") if self.recipe else ():
            try:
                found[split] = prepared_rows(self.run, split)
            except DataError:
                continue
        return found

    def known_rows(self) -> dict[str, list[dict]]:
        """`rows`; Unmeasured where there are none."""
        if not self.rows.get("train"):
            raise Unmeasured(
                "no prepared training data at hand (it is in a run folder): what it learned from is unknown"
            )
        return self.rows

    def some(self, split: str, most: int = MOST_ROWS) -> list[dict]:
        """At most so many rows of a split, evenly spread."""
        rows = self.rows.get(split, [])
        count = min(most, len(rows))
        return [rows[i * len(rows) // count] for i in range(count)]

    @property
    def chat(self) -> Chat:
        """How prompts are asked."""
        return Chat.of(self.recipe)

    @property
    def settings(self) -> EvaluationConfig:
        return self.recipe.evaluation if self.recipe else EvaluationConfig()

    @property
    def k(self) -> int:
        """Drafts a round: the deepest that is evaluated, up to MOST_K and what the draft allows."""
        k = min(max(self.settings.k), MOST_K)
        return k if self.draft.max_k is None else min(k, self.draft.max_k)

    @property
    def new_tokens(self) -> int:
        return min(self.settings.max_new_tokens, MOST_NEW_TOKENS)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Those that evaluation takes, as many as asked; the built-in ones where its data cannot be read."""
        settings = settings_with(self.settings, num_prompts=self.samples, max_new_tokens=self.new_tokens)
        try:
            _, found = gather_prompts(settings, self.recipe, self.target, self.say)
        except (DataError, EvaluationError) as error:
            self.say(f"note: built-in prompts, since those of the recipe cannot be read ({error})")
            settings = settings_with(settings, prompts="builtin")
            _, found = gather_prompts(settings, None, self.target, self.say)
        room = self.target.max_positions - self.new_tokens - MOST_K
        fitting = [prompt for prompt in found if len(prompt.ids) <= room]
        if not fitting:
            raise Unmeasured(
                f"no prompt leaves room for {self.new_tokens} tokens in {self.target.max_positions} positions"
            )
        return fitting

    @cached_property
    def answers(self) -> Answers:
        """Every prompt answered plain and with the draft in turn, timed, after a warm-up."""
        prompts, target = self.prompts, self.target
        proposer = None if self.loaded is None else self.loaded.proposer(target)
        k = 0 if proposer is None else self.k
        ways = [(Results(), None)] + ([(Results(), proposer)] if proposer else [])
        with progress_bar("answers", len(prompts)) as update:
            for place, prompt in enumerate(prompts):
                update(place, f"K = {k}")
                for results, way in ways:
                    options = {"k": max(k, 1)}
                    if place == 0:
                        generate(target, [prompt.ids], way, max_new_tokens=WARM_UP, **options)
                    done = generate(target, [prompt.ids], way, max_new_tokens=self.new_tokens, **options)
                    results.add([place], done, None)
            update(len(prompts), f"K = {k}")
        return Answers(prompts, ways[0][0], ways[1][0] if proposer else None, k)

    def answer_rows(self) -> list[dict]:
        """Prompt and plain answer of each prompt as a row; only the answer is supervised."""
        return [
            {
                "input_ids": [*prompt.ids, *generation.tokens],
                "loss_mask": [0] * len(prompt.ids) + [1] * len(generation.tokens),
                "domain": prompt.category or "",
            }
            for prompt, generation, _ in self.answers.pairs()
        ]

    @cached_property
    def texts(self) -> Texts:
        """The answers with the target's hidden states."""
        return texts_of(self.target, self.answer_rows(), measured_layers(self.draft, self.target))

    @cached_property
    def documents(self) -> Texts:
        """The same answers behind each other, in several orders, so that each stands early in one and late in another:
        what differs between positions is not what they say.
        """
        rows = self.answer_rows()
        limit = min(self.target.max_positions, DOCUMENT_TOKENS)
        limit = min(limit, self.small_positions or limit)
        turns = [i * len(rows) // ROTATIONS for i in range(ROTATIONS)]
        longer = []
        for turn in dict.fromkeys(turns):
            order = [*rows[turn:], *rows[:turn]]
            ids, mask = ([x for row in order for x in row[name]] for name in ("input_ids", "loss_mask"))
            longer.append({"input_ids": ids[:limit], "loss_mask": mask[:limit]})
        return texts_of(self.target, longer, self.draft.feature_layers)

    @property
    def small_positions(self) -> int | None:
        """Positions of a small model that drafts; None for other drafts."""
        return self.draft.small_target().max_positions if self.draft.method == "kd" else None

    def row_texts(self, split: str) -> Texts | None:
        """Some rows of a split, evenly spread, as training read them; None where there are none."""
        chosen = self.some(split, self.samples)
        if not chosen:
            return None
        limit = self.small_positions or self.target.max_positions
        cut = [{**row, **{name: row[name][:limit] for name in ("input_ids", "loss_mask")}} for row in chosen]
        return texts_of(self.target, cut, self.draft.feature_layers)

    @cached_property
    def trained_layers(self) -> list[int] | None:
        """The hs[k] that the run was trained on; None for drafts from elsewhere."""
        if "start" in self.manifest:
            return list(self.manifest["start"]["layers"])
        return feature_layers(self.recipe, self.target) if self.recipe else None

    @cached_property
    def masters(self) -> Draft | None:
        """The draft with its fp32 weights as trained; None where they are not kept beside it."""
        path = self.folder / MASTER
        if not path.exists():
            return None
        draft = self.draft
        if draft.method == "kd":
            return from_masters(self.folder, path).to(self.target.device).eval().attach(self.target)
        kind = Eagle3Draft if isinstance(draft, Eagle3Draft) else MedusaDraft
        trained = kind.from_pretrained(path).to(self.target.device).eval().attach(self.target)
        return trained.share_embeddings() if isinstance(trained, Eagle3Draft) else trained
