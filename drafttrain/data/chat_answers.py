"""What the target wrote as the message that later turns see, and a server's message as the tokens that it wrote."""

import re
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import Tools, encode
from drafttrain.data.chat_messages import REASONING, Message
from drafttrain.data.chat_spans import THINKING
from drafttrain.data.chat_template import THINK, AnyChat, Messages, names_read
from drafttrain.data.conversations import Conversation

OPEN_THOUGHT = re.compile(rf"{THINK}\s*$")
HARMONY = re.compile(r"(.*?)<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|$)", re.DOTALL)
TAIL = 8
"""Tokens at the end of a prompt that an opening think tag may lie in."""


def answer_message(
    tokens: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int] = (),
    stop_ids: Collection[int] = (),
) -> Message:
    """The answer `tokens` (to `prompt`) as a message: reasoning apart from content where the template knows it.

    Reasoning is what stands between think tags (the first may be the prompt's last word), or in harmony's channel
    analysis. A thought without an end is all reasoning.
    """
    template = tokenizer.chat_template and tokenizer.get_chat_template()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    names = names_read(template) if template else frozenset()
    if not names:
        return {"role": "assistant", "content": text}
    written = tokens[:-1] if len(tokens) and tokens[-1] in stop_ids else tokens
    whole = tokenizer.decode(written, skip_special_tokens=False)
    if "<|message|>" in whole and "<|channel|>" in whole:
        return _of_channels(whole)
    thinking = THINKING.fullmatch(whole)
    if thinking:
        _, reasoning, _, content = thinking.groups()
        content = content.lstrip("\n") if names & set(REASONING) else content
    elif re.match(rf"\s*{THINK}", whole) or OPEN_THOUGHT.search(tokenizer.decode(prompt[-TAIL:])):
        reasoning, content = re.sub(rf"^\s*{THINK}", "", whole), ""
    else:
        return {"role": "assistant", "content": text}
    message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": reasoning.strip("\n")} if reasoning.strip() else message


def _of_channels(text: str) -> Message:
    said: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    for head, body in HARMONY.findall(text):
        if " to=" not in head:
            said["reasoning_content" if "analysis" in head else "content"].append(body)
    message = {"role": "assistant", "content": "".join(said["content"])}
    thought = "".join(said["reasoning_content"])
    return message | {"reasoning_content": thought} if thought.strip() else message


def calls_a_tool(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the answer is addressed to a tool in harmony's way, though none was offered."""
    heads = [head for head, _ in HARMONY.findall(tokenizer.decode(tokens, skip_special_tokens=False))]
    return any("<|channel|>" in head and " to=" in head for head in heads)


def tokens_of_message(
    message: Message,
    said: Messages,
    prompt: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    chat: AnyChat,
    tools: Tools,
    stop_ids: Collection[int],
) -> list[int] | None:
    """The tokens that the target wrote behind `prompt`, the ids of `said`, for a server to answer `message`: as its own
    template writes them, stop included. None where the template writes it otherwise than behind that prompt, or leaves
    out some of it (reasoning, a tool call).
    """
    conversation = Conversation(messages=(*said, message), tools=tuple(tools) if tools else None)
    one = encode(conversation, tokenizer, chat=chat, max_length=2**31, stop_ids=stop_ids)
    if one.dropped or one.input_ids[: len(prompt)] != list(prompt) or not any(one.loss_mask[len(prompt) :]):
        return None
    end = len(one.loss_mask) - one.loss_mask[::-1].index(1)
    tokens = one.input_ids[len(prompt) : end]
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    parts = [message.get("reasoning_content"), message["content"], *names]
    return tokens if all(part.strip() in text for part in parts if part) else None
