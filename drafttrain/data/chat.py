"""From one conversation to token ids and a loss mask: m[p] = 1 iff x[p] is a token the target produces, stop included.
Rendered once, tokenised once; where the answers lie in the text is chat_spans.py's.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat_messages import RowError
from drafttrain.data.chat_spans import Span, answer_spans, lost, mark_for, mark_parts
from drafttrain.data.chat_template import (
    GENERATION_TAG,
    AnyChat,
    Chat,
    Messages,
    Rendering,
    need_template,
    use_template,
)
from drafttrain.data.conversations import Conversation, DataError

Tools = Sequence[Mapping[str, Any]] | None
Run = tuple[int, int, bool]  # first, last: tokens [first, last); whether it ends with the first stop token in it

NOTHING = "no supervised token"
CUT = "no supervised token within max_length"


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
    chat: AnyChat,
    max_length: int,
    stop_ids: Collection[int],
) -> Encoded:
    """Token ids and loss mask of one conversation, cut on the right at `max_length` tokens.

    Messages, and prompt with completion, go through the chat template unless `chat` is "none" (or "auto" without a
    template); supervised are the answers and the stop token after each. Plain text: every token but BOS. Token rows: as
    given. A conversation that the template refuses, or in which the answers cannot be told from its own text, comes
    back empty, with `dropped` saying why. Raises DataError when the template is missing or reads no such switch.
    """
    try:
        return _encode(conversation, tokenizer, Chat.read(chat), max_length, stop_ids)
    except RowError as error:
        return Encoded([], [], error.reason, conversation.source, domain=conversation.domain)


def _encode(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    max_length: int,
    stop_ids: Collection[int],
) -> Encoded:
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer gives no character offsets, expected a fast one; save a tokenizer.json beside it"
        )
    messages = _messages(conversation, tokenizer, chat)
    if messages is not None:
        rendering = Rendering(messages, tokenizer, chat, conversation.source, conversation.tools)
        ids, mask, open_turns = _encode_chat(messages, rendering, stop_ids)
    elif conversation.prompt is not None:
        ids, mask, open_turns = _encode_pair(conversation, tokenizer, stop_ids)
    else:
        ids, mask = _encode_plain(conversation, tokenizer)
        open_turns = 0
    kept = mask[:max_length]
    dropped = None if any(kept) else CUT if any(mask) else NOTHING
    return Encoded(ids[:max_length], kept, dropped, conversation.source, open_turns, conversation.domain)


def prompt_ids(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    chat: AnyChat,
    tools: Tools = None,
    source: str = "a prompt",
) -> list[int]:
    """Ids of a conversation that ends with the user's turn or a tool's result, with the header before the answer.

    Without a template ("none", or "auto" and the tokenizer has none) a single user message is plain text: BOS and its
    tokens. Raises DataError when the target would not be next or a template is needed and missing, RowError where it
    refuses the conversation.
    """
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise DataError("found a prompt whose last turn is not the user's, expected one; drop the last answer")
    if len(messages) == 1 and not use_template(tokenizer, chat):
        return _plain_ids(messages[0]["content"], tokenizer)
    need_template(tokenizer, chat, "a prompt of several messages")
    text = Rendering(messages, tokenizer, Chat.read(chat), source, tools, add_generation_prompt=True).text
    return _deduplicate(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer)[0]


def continuation_ids(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, stop: int, chat: AnyChat = "auto"
) -> list[int] | None:
    """Ids that stand between an answer the target ended with the token `stop` and its next one.

    `messages` end with that answer and the user's next turn. The template's own closing of the answer is left out where
    it is `stop`, so that answer ids + these + answer ids is the conversation. None where it is not: where the template
    writes the past otherwise than it was asked and answered (it drops the reasoning of earlier turns, or moves the
    system message to the last). DataError: no template, or the answer is not in what it renders.
    """
    place = "a conversation of several turns"
    need_template(tokenizer, chat, place)
    rendering = Rendering(messages, tokenizer, Chat.read(chat), place, add_generation_prompt=True)
    mark = mark_for(messages, rendering)
    [answer], contents = mark_parts(messages[-2:-1], mark)
    if not contents:  # Nothing was said: the mark stands where it would have been.
        answer, contents = {**answer, "content": f"{mark}0az"}, {(0, "a"): ""}
    parts = [f"{mark}0{part}z" for _, part in contents]
    text = rendering.render([*messages[:-2], answer, messages[-1]], add_generation_prompt=True)
    if parts[-1] not in text:
        raise lost(place, parts[-1])
    asked = rendering.render(messages[:-2], add_generation_prompt=True)
    if not text.startswith(asked) or any(part not in text[len(asked) :] for part in parts):
        return None
    ids = _tokenize(text.rpartition(parts[-1])[2], tokenizer)[0]
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
        other = next((one for one in encoded if one.dropped not in (None, CUT, NOTHING)), None)
        if other is not None:
            count = dropped[other.dropped]
            likely = f"{count} of {len(encoded)} rows are dropped: {other.dropped}, such as {other.source or 'a row'}"
        elif dropped[CUT]:
            likely = f"{dropped[CUT]} of {len(encoded)} answers begin after the cut; raise data.max_length"
        else:
            likely = "the rows hold prompts without answers, or loss_mask is all 0; add answers or set data.regenerate"
        raise DataError(f"every token is masked: {likely}")
    bos = tokenizer.bos_token_id
    return {
        "conversations": len(encoded),
        "dropped": dict(dropped),
        "dropped_first": {one.dropped: one.source for one in reversed(encoded) if one.dropped is not None},
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens,
        "doubled_bos": sum(bos is not None and one.input_ids[:2] == [bos, bos] for one in kept),
        "unsupervised_stop": sum(one.open_turns for one in kept),
    }


# What a conversation becomes.


def _messages(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat: Chat) -> Messages | None:
    if conversation.messages is not None:
        need_template(tokenizer, chat, conversation.source)
        if conversation.refused:
            raise RowError(conversation.source, conversation.refused)
        return conversation.messages
    if conversation.prompt is None:
        return None
    if chat.mode == "template":
        need_template(tokenizer, chat, conversation.source)
    if not use_template(tokenizer, chat):
        return None
    answer = [] if conversation.completion is None else [{"role": "assistant", "content": conversation.completion}]
    return [{"role": "user", "content": conversation.prompt}, *answer]


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
    mask, open_turns = _supervise(ids, [(first, len(ids), False)], tokenizer, stop_ids, conversation.source)
    if open_turns and tokenizer.eos_token_id is not None:
        return [*ids, tokenizer.eos_token_id], [*mask, 1], 0
    return ids, mask, open_turns


def _encode_chat(
    messages: Messages, rendering: Rendering, stop_ids: Collection[int]
) -> tuple[list[int], list[int], int]:
    tokenizer = rendering.tokenizer
    if GENERATION_TAG.search(rendering.template):
        ids, runs = _marked_runs(messages, rendering)
    else:
        ids, offsets = _tokenize(rendering.text, tokenizer)
        runs = [_token_run(offsets, span) for span in answer_spans(messages, rendering)]
    mask, open_turns = _supervise(ids, runs, tokenizer, stop_ids, rendering.source)
    ids, removed = _deduplicate(ids, tokenizer)
    return ids, mask[removed:], open_turns


def _marked_runs(messages: Messages, rendering: Rendering) -> tuple[list[int], list[Run]]:
    """By the template's own {% generation %} marks."""
    out = rendering.apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    mask = out["assistant_masks"]
    edges = [i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])]
    runs = [(first, last, False) for first, last in zip(edges[::2], edges[1::2], strict=True)]
    return list(out["input_ids"]), runs


def _token_run(offsets: list[tuple[int, int]], span: Span) -> Run:
    first = bisect_left(offsets, span.floor, key=lambda offset: offset[0])
    while first < len(offsets) and offsets[first][1] <= span.start:
        first += 1
    return first, max(first, bisect_left(offsets, span.end, key=lambda offset: offset[0])), span.to_stop


def _supervise(
    ids: list[int], runs: list[Run], tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], source: str
) -> tuple[list[int], int]:
    """Mask of `runs` [first, last), each ended at its first stop, or else carried on to the one that follows it."""
    mask, open_turns = [0] * len(ids), 0
    for first, last, to_stop in runs:
        end = next((i + 1 for i in range(first, last) if ids[i] in stop_ids), None)
        if end is None and to_stop:
            raise RowError(source, "no stop token of the target ends a tool call")
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


# The tokenizer.


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
