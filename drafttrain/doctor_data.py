"""Checks of what a draft learned from: template and headers, the share of supervised tokens, thinking on or off."""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from drafttrain.data.batching import row_name
from drafttrain.data.chat import encode
from drafttrain.data.chat_template import Chat, chat_facts, use_template
from drafttrain.data.conversations import Conversation, DataError, parse_row, read_entry
from drafttrain.data.prepare import conversation_prompt
from drafttrain.doctor_case import Case, Problem, Result, Unmeasured, verdict
from drafttrain.doctor_words import percent, said
from drafttrain.drafts.base import template_hash

ROWS = 64
"""Rows that are encoded again, and rows of a split whose text is decoded: enough to meet a fault in one row of twenty
with 96%.
"""
FEW = 0.01
"""Share of rows that may show a fault of the template: a base model writes a header of its own now and then."""
LOW_SHARE, HIGH_SHARE, SPLITS_APART, MOST_DROPPED = 0.05, 0.98, 3.0, 0.2
THINK = re.compile(
    r"(?:<(?:\w+:)?think(?:ing)?>|\[THINK\]|<\|channel\|>analysis<\|message\|>)(.*?)"
    r"(?:</(?:\w+:)?think(?:ing)?>|\[/THINK\]|<\|end\|>|$)",
    re.DOTALL,
)
SWITCH = re.compile(r"enable_thinking|\bthinking\b|<think>|\[THINK\]|analysis<\|message\|>")
APART = 0.4
NEAR = 24
"""Tokens in front of an answer that can hold the template's own thinking block."""

PREPARE = "prepare the data again (drafttrain prepare --fresh) and train again"


# template


def template(case: Case) -> Result:
    """BOS doubled, headers or the user's words supervised, and another template at preparing than now.

    A fault must show in more than FEW of the rows. Headers are found by their ids, as the target's template writes
    them; rows are encoded again, or of answers by the target their prompts, where their file is still there.
    """
    rows, tokenizer = case.known_rows(), case.target.tokenizer
    if tokenizer is None:
        raise Unmeasured("the target has no tokenizer")
    problems: list[Problem] = [*_template_changed(case, tokenizer)]
    everything = [row for split in rows for row in case.some(split)]
    problems += _doubled_bos(everything, [prompt.ids for prompt in case.prompts], tokenizer)
    evidence = [f"{len(everything)} rows and {len(case.prompts)} prompts: no BOS doubled"] if not problems else []
    if use_template(tokenizer, case.chat):
        header = header_ids(tokenizer, case.chat)
        found, told = _headers(everything, header, case)
        problems += found
        evidence += told
    else:
        evidence.append("no chat template in use")
    again, told = _encoded_again(case)
    return verdict([*problems, *again], [*evidence, *told])


def _template_changed(case: Case, tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    before = case.facts.get("target_template_sha256")
    if before is not None and before != template_hash(tokenizer):
        yield (
            f"the chat template is another than at training ({before[:8]}, now {template_hash(tokenizer)[:8]})",
            PREPARE,
        )


def _doubled_bos(rows: Sequence[dict], prompts: Sequence[Sequence[int]], tokenizer) -> Iterator[Problem]:
    bos = tokenizer.bos_token_id
    for what, texts in (("rows", [row["input_ids"] for row in rows]), ("evaluation prompts", prompts)):
        doubled = [i for i, ids in enumerate(texts) if bos is not None and list(ids[:2]) == [bos, bos]]
        if len(doubled) > FEW * len(texts):
            name = row_name(rows[doubled[0]]) if what == "rows" else f"prompt {doubled[0]}"
            found = f"BOS doubled in {len(doubled)} of {len(texts)} {what}: {name} begins {tokenizer.bos_token!r} twice"
            yield found, f"give the text without BOS, the template writes it; then {PREPARE}"


def header_ids(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[int]:
    """What the template writes in front of an answer, as token ids; none where it writes nothing."""
    header = chat_facts(tokenizer, chat)["header"]
    return tokenizer(header, add_special_tokens=False)["input_ids"] if header else []


def places(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where `part` begins in `ids`."""
    whole = list(part)
    return [i for i, token in enumerate(ids) if token == whole[0] and list(ids[i : i + len(whole)]) == whole]


def _headers(rows: Sequence[dict], header: list[int], case: Case) -> tuple[list[Problem], list[str]]:
    tokenizer, stops = case.target.tokenizer, set(case.target.stop_ids)
    if not header:
        return [], ["the template writes no header in front of an answer"]
    text = tokenizer.decode(header)
    faults: dict[str, list[str]] = {"header": [], "user": []}
    led, answered = 0, 0
    for row in rows:
        ids, mask = row["input_ids"], row["loss_mask"]
        starts = places(ids, header)
        for start in starts:
            inside = range(start, start + len(header))
            before = max((i + 1 for i in range(start) if ids[i] in stops), default=0) if start != starts[0] else 0
            for name, span in (("header", inside), ("user", range(before, start))):
                said = [i for i in span if mask[i]]
                if said and row_name(row) not in {one.split(" position")[0] for one in faults[name][-1:]}:
                    shown = tokenizer.decode([ids[i] for i in said[:6]])
                    faults[name].append(f"{row_name(row)} position {said[0]}: {shown!r}")
        first = next((i for i, one in enumerate(mask) if one), None)
        if first is not None:
            answered += 1
            led += bool(places(ids[max(0, first - len(header) - NEAR) : first + len(header)], header))
    problems = []
    for name, what in (("header", f"the header {text!r}"), ("user", "the user's text")):
        if len(faults[name]) > FEW * len(rows):
            found = f"{what} is supervised in {len(faults[name])} of {len(rows)} rows: {faults[name][0]}"
            problems.append((found, f"mask all but the answers (loss_mask, or give messages); then {PREPARE}"))
    asked = sum(bool(places(p.ids[-len(header) - NEAR :], header)) for p in case.prompts) / len(case.prompts)
    trained = led / max(1, answered)
    if abs(asked - trained) > 0.5:
        found = (
            f"the header {text!r} stands in front of {percent(asked)} of the evaluation prompts' answers and "
            f"{percent(trained)} of the training rows' answers: two templates"
        )
        problems.append((found, f"give conversations as messages, which go through the template; then {PREPARE}"))
    told = f"the header {text!r} leads {percent(trained)} of the answers in training, {percent(asked)} in evaluation"
    return problems, [told]


def _encoded_again(case: Case) -> tuple[list[Problem], list[str]]:
    """Rows of the training data encoded anew from their file, beside the prepared ones."""
    split, settings = "train", case.recipe.data
    entries = settings.train
    if any(entry.path is None for entry in entries):
        return [], ["rows were not encoded again: the data is on the hub"]
    rows = case.rows[split][:ROWS]
    answered = settings.regenerate is not None and split in settings.regenerate.splits
    different, compared = [], 0
    try:
        for row, conversation in _origins(case, rows, entries):
            compared += 1
            found = _difference(row, conversation, case, answered)
            different += [found] if found else []
    except DataError as error:
        return [], [f"rows were not encoded again: {error}"]
    if len(different) > FEW * compared:
        found = f"{len(different)} of {compared} rows come out otherwise when encoded now: {different[0]}"
        return [(found, f"serve with the template that the data was prepared with, or {PREPARE}")], []
    what = "prompts of rows" if answered else "rows"
    return [], [f"{compared} {what} encoded again: the same ids and mask"] if compared else []


def _origins(case: Case, rows: Sequence[dict], entries) -> Iterator[tuple[dict, Conversation]]:
    """Rows with the conversations that they were made from: by their source, of older folders by their place."""
    by_source = {row["source"]: row for row in rows if row["source"]}
    whole = not case.manifest["audit"]["train"]["dropped"] and all(entry.weight == 1 for entry in entries)
    number = 0
    for entry in entries:
        for row, source in read_entry(entry):
            if by_source:
                origin = by_source.pop(source, None)
                if not by_source and origin is None:
                    return
            else:
                origin = rows[number] if whole and number < len(rows) else None
                if origin is None:
                    return
            number += 1
            if origin is not None:
                yield origin, parse_row(row, entry.format, source)


def _difference(row: dict, conversation: Conversation, case: Case, answered: bool) -> str | None:
    """Where a prepared row is other than its conversation encoded now, in words; None where it is the same."""
    target, data, tokenizer = case.target, case.recipe.data, case.target.tokenizer
    if answered:
        ids = conversation_prompt(conversation, target, case.chat)
        mask = [0] * len(ids)
    else:
        length = data.max_length
        one = encode(conversation, tokenizer, chat=case.chat, max_length=length, stop_ids=target.stop_ids)
        ids, mask = one.input_ids, one.loss_mask
        if len(ids) != len(row["input_ids"]):
            ids = [*ids, *[-1] * (len(row["input_ids"]) - len(ids))]
    for place, (now, token, taught, supervised) in enumerate(
        zip(ids, row["input_ids"], [*mask, *[0] * len(ids)], row["loss_mask"], strict=False)
    ):
        word = partial(_word, tokenizer)
        if now != token:
            return f"{row_name(row)} position {place}: prepared {word(token)}, now {word(now)}"
        if taught != supervised:
            kind = "supervised" if supervised else "not supervised"
            return f"{row_name(row)} position {place}: {word(token)} is {kind}, now the other way"
    return None


def _word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return "nothing" if token < 0 else repr(tokenizer.decode([token]))


# mask


def mask(case: Case) -> Result:
    """Share of supervised tokens in each split.

    Below LOW_SHARE nineteen tokens in twenty are read for nothing and few rows carry the loss. Above HIGH_SHARE, in
    rows that have prompts (answers by the target, or through a template), the prompt is trained too; of plain text all
    is supervised by design. Splits more than SPLITS_APART times apart measure different things. More than MOST_DROPPED
    of the conversations dropped: another data set than was meant.
    """
    problems: list[Problem] = []
    evidence, shares = [], {}
    data = case.recipe.data if case.recipe else None
    for split, rows in case.known_rows().items():
        tokens, supervised = (sum(len(row["loss_mask"]) for row in rows), sum(sum(row["loss_mask"]) for row in rows))
        shares[split] = supervised / tokens
        evidence.append(f"{split}: {len(rows)} rows, {tokens:,} tokens, {percent(shares[split])} supervised")
        answered = data.regenerate is not None and split in data.regenerate.splits
        has_prompts = answered or _through_template(case, split)
        if shares[split] < LOW_SHARE:
            mend = "longer answers, shorter prompts, or data.max_length that does not cut the answers off"
            problems.append((f"{split}: only {percent(shares[split])} of the tokens are supervised", mend))
        if shares[split] > HIGH_SHARE and has_prompts:
            mend = "supervise the answers alone (loss_mask 0 on prompts), prepare and train again"
            problems.append((f"{split}: {percent(shares[split])} are supervised, the prompts too", mend))
        audit = case.manifest.get("audit", {}).get(split, {})
        dropped = sum(audit.get("dropped", {}).values())
        if dropped > MOST_DROPPED * audit.get("conversations", 1):
            reason = max(audit["dropped"], key=audit["dropped"].get)
            found = f"{split}: {dropped} of {audit['conversations']} conversations were dropped, most for: {reason}"
            problems.append((found, "raise data.max_length, or mend the data (drafttrain prepare RECIPE --show-mask)"))
        if audit.get("unsupervised_stop"):
            evidence.append(f"  {audit['unsupervised_stop']} of its answers end without a stop token")
    if len(shares) == 2 and max(shares.values()) > SPLITS_APART * min(shares.values()):
        told = " and ".join(f"{percent(value)} in {split}" for split, value in shares.items())
        mend = "take validation data of the same kind as the training data"
        problems.append((f"supervised shares are far apart: {told}", mend))
    return verdict(problems, evidence, shares=shares)


def _through_template(case: Case, split: str) -> bool:
    tokenizer = case.target.tokenizer
    if tokenizer is None or not use_template(tokenizer, case.chat):
        return False
    header, rows = header_ids(tokenizer, case.chat), case.some(split, ROWS)
    return bool(header) and sum(bool(places(row["input_ids"], header)) for row in rows) > len(rows) / 2


# thinking


def thinks(text: str) -> bool:
    """Whether a text has reasoning in it that is not blank: an empty block is how templates switch thinking off."""
    return any(match[1].strip() for match in THINK.finditer(text))


def thinking(case: Case) -> Result:
    """Reasoning in what the target writes now against reasoning in what the draft learned from.

    Both are counted in texts, with NEAR tokens of the prompt, where the template may open or close the block. More than
    APART of them apart: with eight answers chance gives that once in 200 where both shares are the same.
    """
    tokenizer = case.target.tokenizer
    if tokenizer is None:
        raise Unmeasured("the target has no tokenizer")
    answers = [[*p.ids[-NEAR:], *plain.tokens] for p, plain, _ in case.answers.pairs()]
    now = sum(thinks(tokenizer.decode(ids)) for ids in answers) / len(answers)
    trained = case.facts.get("chat_template_kwargs", {})
    problems: list[Problem] = []
    if case.facts and trained != dict(case.chat.switches):
        found = (
            f"trained with chat_template_kwargs {trained or 'none'}, asked with {dict(case.chat.switches) or 'none'}"
        )
        problems.append(
            (found, "ask with the switches of training (data.chat_template_kwargs; in an engine the same name)")
        )
    if problems and not case.rows.get("train"):
        return verdict(problems, [f"reasoning in {percent(now)} of {len(answers)} answers now"], now=now)
    case.known_rows()
    spread = case.some("train", ROWS)
    then = sum(thinks(tokenizer.decode(_said(row))) for row in spread) / len(spread)
    switch = "has" if SWITCH.search(tokenizer.chat_template or "") else "has no"
    evidence = (
        f"reasoning in {percent(then)} of {len(spread)} training rows, {percent(now)} of {len(answers)} answers now"
    )
    if now - then > APART:
        mend = "regenerate the training answers with thinking on, or serve with enable_thinking false"
        problems.append(("the target thinks now, and reasoning is missing from the training data", mend))
    if then - now > APART:
        mend = "serve with thinking on (enable_thinking true), or regenerate the training answers with it off"
        problems.append(("the draft learned from reasoning, and the target does not think now", mend))
    return verdict(problems, [evidence, f"the template {switch} thinking switch"], training=then, now=now)


def _said(row: dict) -> list[int]:
    """The supervised tokens and what stands right before the first."""
    first = next((i for i, one in enumerate(row["loss_mask"]) if one), 0)
    before = row["input_ids"][max(0, first - NEAR) : first]
    return [*before, *said(row)]
