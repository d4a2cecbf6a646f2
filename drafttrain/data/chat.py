"""From one conversation to token ids and a loss mask: m[p] = 1 iff x[p] is a token the target produces, stop included.
Rendered once, tokenised once; the answers are found in the text by walking the template's own literal pieces."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from drafttrain.data.conversations import Conversation, DataError

ChatMode = Literal["auto", "template", "none"]
Messages = Sequence[dict[str, str]]
Span = tuple[int, int, int]  # characters: earliest start of a supervised token, start and end of what the target wrote

NOTHING = "no supervised token"
CUT = "no supervised token within max_length"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHT_END = re.compile(r"\s*</think>\s*")
THINKING = re.compile(r"(\s*<think>)?(.*)(</think>)(.*)", re.DOTALL)


@dataclass
class Encoded:
    """One conversation as the target sees it.

    input_ids: token ids, at most max_length; loss_mask: 0 or 1 for each; dropped: why it cannot be trained on, or None;
    open_turns: answers that no stop token closes (the draft never learns to stop there); source and domain: the
    conversation's.
    """

    input_ids: list[int]
    loss_mask: list[int]
    dropped: str | None = None
    source: str = ""
    open_turns: int = 0
    domain: str = ""


def encode(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: ChatMode,
    max_length: int,
    stop_ids: Collection[int],
) -> Encoded:
    """Token ids and loss mask of one conversation, cut on the right at `max_length` tokens.

    Messages, and prompt with completion, go through the chat template unless `chat` is "none" (or "auto" without a
    template); supervised are the answers and the stop token after each. Plain text: every token but BOS. Token rows: as
    given. Raises DataError when the template is missing, fails, or cannot be followed.
    """
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer gives no character offsets, expected a fast one; save a tokenizer.json beside it"
        )
    messages = _messages(conversation, tokenizer, chat)
    if messages is not None:
        ids, mask, open_turns = _encode_chat(messages, tokenizer, stop_ids, conversation.source)
    elif conversation.prompt is not None:
        ids, mask, open_turns = _encode_pair(conversation, tokenizer, stop_ids)
    else:
        ids, mask = _encode_plain(conversation, tokenizer)
        open_turns = 0
    kept = mask[:max_length]
    dropped = None if any(kept) else CUT if any(mask) else NOTHING
    return Encoded(ids[:max_length], kept, dropped, conversation.source, open_turns, conversation.domain)


def prompt_ids(messages: Messages, tokenizer: PreTrainedTokenizerBase, chat: ChatMode) -> list[int]:
    """Ids of a conversation that ends with the user's turn, with the header the target answers after.

    Without a template ("none", or "auto" and the tokenizer has none) a single user message is plain text: BOS and its
    tokens. Raises DataError when the last turn is not the user's or a template is needed and missing.
    """
    if not messages or messages[-1]["role"] != "user":
        raise DataError("found a prompt whose last turn is not the user's, expected one; drop the last answer")
    if len(messages) == 1 and not use_template(tokenizer, chat):
        return _plain_ids(messages[0]["content"], tokenizer)
    need_template(tokenizer, chat, "a prompt of several messages")
    text = _render(messages, tokenizer, "a prompt", add_generation_prompt=True)
    return _deduplicate(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer)[0]


def continuation_ids(messages: Messages, tokenizer: PreTrainedTokenizerBase, stop: int) -> list[int]:
    """Ids that stand between an answer the target ended with the token `stop` and its next one.

    `messages` end with that answer and the user's next turn. The template's own closing of the answer is left out where
    it is `stop`, so that answer ids + these + answer ids is the conversation. DataError: no template, or the answer is
    not in what it renders.
    """
    need_template(tokenizer, "auto", "a conversation of several turns")
    mark = "zqx"
    while any(mark in part for part in (tokenizer.get_chat_template(), *(m["content"] for m in messages))):
        mark += "q"
    marked = [*messages[:-2], {**messages[-2], "content": mark}, messages[-1]]
    text = _render(marked, tokenizer, "a conversation of several turns", add_generation_prompt=True)
    before, found, after = text.rpartition(mark)
    if not found:
        raise _lost("a conversation of several turns", before[-60:])
    ids = _tokenize(after, tokenizer)[0]
    first = next((i for i, token in enumerate(ids) if not _says_nothing(token, tokenizer)), len(ids))
    return ids[ids.index(stop, 0, first) + 1 :] if stop in ids[:first] else ids


def audit(encoded: Sequence[Encoded], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Counts over all conversations; tokens, supervised and what follows them are of those that were kept.

    Raises DataError when there is no conversation, or no supervised token in any of them.
    """
    if not encoded:
        raise DataError("no conversations to train on; check data.train")
    kept = [one for one in encoded if one.dropped is None]
    dropped = Counter(one.dropped for one in encoded if one.dropped is not None)
    tokens = sum(len(one.input_ids) for one in kept)
    supervised = sum(sum(one.loss_mask) for one in kept)
    if supervised == 0:
        if dropped[CUT]:
            likely = f"{dropped[CUT]} of {len(encoded)} answers begin after the cut; raise data.max_length"
        else:
            likely = "the rows hold prompts without answers, or loss_mask is all 0; add answers or set data.regenerate"
        raise DataError(f"every token is masked: {likely}")
    bos = tokenizer.bos_token_id
    return {
        "conversations": len(encoded),
        "dropped": dict(dropped),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens,
        "doubled_bos": sum(bos is not None and one.input_ids[:2] == [bos, bos] for one in kept),
        "unsupervised_stop": sum(one.open_turns for one in kept),
    }


# What a conversation becomes.


def _messages(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat: ChatMode) -> Messages | None:
    if conversation.messages is not None:
        need_template(tokenizer, chat, conversation.source)
        return conversation.messages
    if conversation.prompt is None:
        return None
    if chat == "template":
        need_template(tokenizer, chat, conversation.source)
    if not use_template(tokenizer, chat):
        return None
    answer = [] if conversation.completion is None else [{"role": "assistant", "content": conversation.completion}]
    return [{"role": "user", "content": conversation.prompt}, *answer]


def use_template(tokenizer: PreTrainedTokenizerBase, chat: ChatMode) -> bool:
    return chat == "template" or (chat == "auto" and tokenizer.chat_template is not None)


def need_template(tokenizer: PreTrainedTokenizerBase, chat: ChatMode, source: str) -> None:
    if chat == "none":
        raise DataError(f"{source}: messages need a chat template, but data.chat is none; set data.chat: template")
    if tokenizer.chat_template is None:
        raise DataError(
            f"{source}: messages need a chat template and the tokenizer has none; use the instruction-tuned target, "
            "put a chat_template.jinja into the target's folder, or give prompt and completion or plain text"
        )


def _encode_plain(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    if conversation.input_ids is not None:
        ids = list(conversation.input_ids)
        if conversation.loss_mask is not None:
            return ids, list(conversation.loss_mask)
    else:
        ids = _plain_ids(conversation.text, tokenizer)
    return ids, [int(not (position == 0 and token == tokenizer.bos_token_id)) for position, token in enumerate(ids)]


def _encode_pair(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]
) -> tuple[list[int], list[int], int]:
    prompt, completion = conversation.prompt, conversation.completion or ""
    ids, offsets = _tokenize(prompt + completion, tokenizer)
    first = next((i for i, (start, _) in enumerate(offsets) if start >= len(prompt)), len(ids))
    bos = _bos(tokenizer)
    ids, removed = _deduplicate(bos + ids, tokenizer)
    first += len(bos) - removed
    if conversation.completion is None:
        return ids, [0] * len(ids), 0
    mask, open_turns = _supervise(ids, [(first, len(ids))], tokenizer, stop_ids)
    if open_turns and tokenizer.eos_token_id is not None:
        return [*ids, tokenizer.eos_token_id], [*mask, 1], 0
    return ids, mask, open_turns


def _encode_chat(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], source: str
) -> tuple[list[int], list[int], int]:
    if GENERATION_TAG.search(tokenizer.get_chat_template()):
        ids, runs = _marked_runs(messages, tokenizer, source)
    else:
        text = _render(messages, tokenizer, source)
        ids, offsets = _tokenize(text, tokenizer)
        runs = [_token_run(offsets, span) for span in answer_spans(messages, text, tokenizer, source)]
    mask, open_turns = _supervise(ids, runs, tokenizer, stop_ids)
    ids, removed = _deduplicate(ids, tokenizer)
    return ids, mask[removed:], open_turns


def _marked_runs(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, source: str
) -> tuple[list[int], list[tuple[int, int]]]:
    out = _apply(messages, tokenizer, source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    mask = out["assistant_masks"]
    edges = [i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])]
    return list(out["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True))


def _token_run(offsets: list[tuple[int, int]], span: Span) -> tuple[int, int]:
    floor, start, end = span
    first = bisect_left(offsets, floor, key=lambda offset: offset[0])
    while first < len(offsets) and offsets[first][1] <= start:
        first += 1
    return first, max(first, bisect_left(offsets, end, key=lambda offset: offset[0]))


def _supervise(
    ids: list[int], runs: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]
) -> tuple[list[int], int]:
    """Mask of `runs` [first, last), each carried on to the stop token that follows it and ended at its first stop."""
    mask, open_turns = [0] * len(ids), 0
    for first, last in runs:
        end = next((i + 1 for i in range(first, last) if ids[i] in stop_ids), None)
        if end is None:
            after = last
            while after < len(ids) and ids[after] not in stop_ids and _says_nothing(ids[after], tokenizer):
                after += 1
            closed = after < len(ids) and ids[after] in stop_ids
            end = after + 1 if closed else last
            open_turns += not closed
        mask[first:end] = [1] * (end - first)
    return mask, open_turns


def _says_nothing(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return (added is not None and added.special) or not tokenizer.decode([token]).strip()


# Where the answers lie in the rendered text.


def answer_spans(messages: Messages, text: str, tokenizer: PreTrainedTokenizerBase, source: str) -> list[Span]:
    """Character spans of what the target wrote in `text`, the rendered `messages`, one for each answer.

    The same conversation is rendered with a mark for each content; what stands between the marks is the template's, and
    the text is walked literal, content, literal. A written-out thinking block counts as the target's, an empty one as
    the template's. Raises DataError when the text does not follow its skeleton.
    """
    mark = "zqx"
    while any(mark in part for part in (text, tokenizer.get_chat_template(), *(m["content"] for m in messages))):
        mark += "q"
    marked, contents = _mark(messages, mark)
    pieces = re.split(rf"{mark}(\d+)([ra])z", _render(marked, tokenizer, source))
    literals, keys = pieces[::3], [(int(i), part) for i, part in zip(pieces[1::3], pieces[2::3], strict=True)]
    asked = _render([{"role": "user", "content": f"{mark}0az"}], tokenizer, source, add_generation_prompt=True)
    header = asked.rpartition(f"{mark}0az")[2]
    found: dict[int, Span] = {}
    position = len(literals[0])
    if not text.startswith(literals[0]):
        raise _lost(source, literals[0])
    for i, (before, after, key) in enumerate(zip(literals[:-1], literals[1:], keys, strict=True), start=1):
        end = _content_end(text, position, contents[key], after, last=i == len(keys), source=source)
        if messages[key[0]]["role"] == "assistant":
            floor, start = _answer_start(before, header, position, thinking=key[1] == "r")
            floor, start = found.get(key[0], (floor, start, end))[:2]
            closing = THOUGHT_END.match(after) if key[1] == "r" and (key[0], "a") not in contents else None
            found[key[0]] = (floor, start, end + (closing.end() if closing else 0))
        position = end + len(after)
    _check_found(messages, contents, keys, source)
    return list(found.values())


def _mark(messages: Messages, mark: str) -> tuple[list[dict[str, str]], dict[tuple[int, str], str]]:
    """Messages with a mark for each content ("a") and each written-out reasoning ("r"), and what each stands for."""
    marked, contents = [], {}
    for i, message in enumerate(messages):
        content = message["content"]
        thinking = THINKING.fullmatch(content) if message["role"] == "assistant" else None
        opening, reasoning, closing, answer = thinking.groups(default="") if thinking else ("", "", "", content)
        # Blank parts stay as they are: templates branch on emptiness, and there is nothing in them to look for.
        for part, value in (("r", reasoning), ("a", answer)):
            if value.strip():
                contents[i, part] = value
        reasoning = f"{mark}{i}rz" if reasoning.strip() else reasoning
        answer = f"{mark}{i}az" if answer.strip() else answer
        marked.append({**message, "content": opening + reasoning + closing + answer})
    return marked, contents


def _content_end(text: str, position: int, content: str, after: str, *, last: bool, source: str) -> int:
    for variant in _stripped(content):
        end = position + len(variant)
        ends_well = not last or end + len(after) == len(text)
        if ends_well and text.startswith(variant, position) and text.startswith(after, end):
            return end
    # The template changed the content: go on at the next literal.
    end = len(text) - len(after) if last and text.endswith(after) else text.find(after, position) if after else -1
    if end < position or (last and end + len(after) != len(text)):
        raise _lost(source, after)
    return end


def _stripped(content: str) -> Iterator[str]:
    for chars in ("", "\n", None):
        head = content.lstrip(chars)
        for tail_chars in ("", "\n", None):
            yield head.rstrip(tail_chars)


def _answer_start(before: str, header: str, position: int, *, thinking: bool) -> tuple[int, int]:
    """(earliest start of a supervised token, start of the answer) for content at `position` after the literal `before`.

    A token that joins the answer to white space before it is the target's only if the white space is not in the header.
    """
    at = before.rfind(header) if header else -1
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, header, strict=False)))
    extra = before[at + len(header) :] if at >= 0 else before[shared:]
    if thinking and extra.strip() == "<think>":
        return position - len(extra), position - len(extra)
    return position - (len(extra) - len(extra.rstrip())), position


def _check_found(
    messages: Messages, contents: dict[tuple[int, str], str], keys: list[tuple[int, str]], source: str
) -> None:
    answers = [key for key in contents if key[1] == "a" and messages[key[0]]["role"] == "assistant"]
    wrong = [key[0] for key in answers if keys.count(key) != 1]
    if wrong:
        raise DataError(
            f"{source}: the chat template renders the answer in message {wrong[0] + 1} {keys.count((wrong[0], 'a'))} "
            "times, expected once; mend the template or mark the answers in it with {% generation %}"
        )


def _lost(source: str, literal: str) -> DataError:
    return DataError(
        f"{source}: cannot tell the answers from the template's own text (expected {literal[:60]!r} where it is not); "
        "mark the answers in the chat template with {% generation %} ... {% endgeneration %}, or drop the row"
    )


# The tokenizer.


def _render(messages: Messages, tokenizer: PreTrainedTokenizerBase, source: str, **options: bool) -> str:
    return _apply(messages, tokenizer, source, tokenize=False, **options)


def _apply(messages: Messages, tokenizer: PreTrainedTokenizerBase, source: str, **options: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except TemplateError as error:
        raise DataError(
            f"{source}: the chat template refuses the conversation ({error}); change the row to what it allows"
        ) from error


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[tuple[int, int]]]:
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(out["input_ids"]), list(out["offset_mapping"])


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """BOS if the tokenizer itself puts it before plain text, as engines do; some name a BOS that they never use."""
    return [token for token in tokenizer("a")["input_ids"][:1] if token == tokenizer.bos_token_id]


def _deduplicate(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Ids with a single BOS in front, and the number of tokens removed."""
    bos, count = tokenizer.bos_token_id, 0
    while bos is not None and ids[count : count + 2] == [bos, bos]:
        count += 1
    return ids[count:], count


def _plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return _deduplicate(_bos(tokenizer) + list(ids), tokenizer)[0]
