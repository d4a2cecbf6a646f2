"""What the loss mask says about a recipe's data, for people: a few conversations token by token with the supervised
tokens marked, the counts, and the conversations that are dropped.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.style import Style
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import Encoded, encode
from drafttrain.data.chat_template import Chat
from drafttrain.data.conversations import Conversation, load_conversations
from drafttrain.data.regenerate import regenerate
from drafttrain.recipe import Recipe
from drafttrain.target import Target

SUPERVISED = (Style(color="green", bold=True), Style(color="bright_green", bold=True, underline=True))
GIVEN = (Style(dim=True), Style())
"""Neighbouring tokens take turns between two styles, so that their limits show."""
BREAK = "⏎\n"
FIRST_TOKENS = 12


@dataclass
class MaskReport:
    """Of one split: conversations (all of them, or with regenerated answers those shown; a row each), kept ones, their
    tokens and supervised tokens, `shown` conversations, and for each reason how many are dropped and the first of them.
    """

    split: str
    conversations: int
    kept: int
    tokens: int
    supervised: int
    shown: list[Encoded]
    dropped: dict[str, tuple[int, Encoded]] = field(default_factory=dict)
    answered: bool = False

    def facts(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """For --json."""
        dropped = {
            reason: {"count": count, "example": one.source, "text": tokenizer.decode(one.input_ids[:FIRST_TOKENS])}
            for reason, (count, one) in self.dropped.items()
        }
        shown = [
            {
                "source": one.source,
                "tokens": token_texts(one.input_ids, tokenizer),
                "input_ids": one.input_ids,
                "loss_mask": one.loss_mask,
            }
            for one in self.shown
        ]
        counts = ("split", "conversations", "kept", "tokens", "supervised")
        return {**{name: getattr(self, name) for name in counts}, "dropped": dropped, "shown": shown}


def mask_report(recipe: Recipe, target: Target, count: int, split: str = "train") -> MaskReport:
    """The mask of a split of the recipe's data, with `count` conversations spread evenly over it to be shown. Nothing
    is written.

    Where the recipe asks for answers by the target, only these conversations are answered. Raises DataError as
    `prepare` does, except for conversations that it drops.
    """
    conversations = load_conversations(getattr(recipe.data, split), recipe.data.seed)
    settings = recipe.data.regenerate
    answered = settings is not None and split in settings.splits
    if answered:
        conversations = [conversations[i] for i in _spread(len(conversations), count)]
        encoded = _answered(recipe, target, conversations)
    else:
        encoded = [
            encode(
                one,
                target.tokenizer,
                chat=Chat.of(recipe),
                max_length=recipe.data.max_length,
                stop_ids=target.stop_ids,
            )
            for one in conversations
        ]
    kept = [one for one in encoded if one.dropped is None]
    dropped: dict[str, tuple[int, Encoded]] = {}
    asked = {conversation.source: conversation for conversation in conversations}
    for one in encoded:
        if one.dropped is not None:
            number, first = dropped.get(one.dropped, (0, one if one.input_ids else _prompt(one, asked, target)))
            dropped[one.dropped] = (number + 1, first)
    tokens, supervised = sum(len(one.input_ids) for one in kept), sum(sum(one.loss_mask) for one in kept)
    shown = [kept[i] for i in _spread(len(kept), count)]
    return MaskReport(split, len(encoded), len(kept), tokens, supervised, shown, dropped, answered)


def _answered(recipe: Recipe, target: Target, conversations: list[Conversation]) -> list[Encoded]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"chat": Chat.of(recipe), "max_length": recipe.data.max_length}
        return regenerate(target, conversations, recipe.data.regenerate, Path(folder) / "answers.jsonl", **options)


def _spread(length: int, count: int) -> list[int]:
    count = min(length, count)
    return [i * length // count for i in range(count)]


def _prompt(one: Encoded, asked: dict[str, Conversation], target: Target) -> Encoded:
    """What was asked, where nothing came back."""
    conversation = asked[one.source]
    text = conversation.prompt or " ".join(message["content"] or "" for message in conversation.messages or ())
    return replace(one, input_ids=target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def mask_text(report: MaskReport, tokenizer: PreTrainedTokenizerBase, coloured: bool) -> Text:
    """The report as text: supervised tokens green, or in [brackets] with the others between bars where there is no
    colour. Special tokens are spelled out, and a line break is ⏎.
    """
    text = Text()
    for one in report.shown:
        count, supervised = len(one.input_ids), sum(one.loss_mask)
        title = f"{one.source or report.split}: {count} tokens, {supervised} supervised ({supervised / count:.0%})"
        text.append(title + (f", {one.open_turns} answers without a stop" if one.open_turns else "") + "\n", "bold")
        (_coloured if coloured else _plain)(text, one, token_texts(one.input_ids, tokenizer))
        text.append("\n\n")
    share = report.supervised / max(report.tokens, 1)
    text.append(
        f"{report.split}: {report.conversations} conversations, {report.kept} kept, {report.tokens} tokens, "
        f"{report.supervised} supervised ({share:.0%})\n"
    )
    if report.answered:
        text.append("answers by the target: only the conversations above were answered\n")
    for reason, (count, one) in report.dropped.items():
        start = "".join(token_texts(one.input_ids[:FIRST_TOKENS], tokenizer)).replace("\n", BREAK.strip())
        text.append(f"dropped {count}: {reason}; such as {one.source or 'a row'}: {start} ..\n", "red")
    if not report.kept:
        text.append("nothing is left to train on\n", "red")
    return text


def _coloured(text: Text, one: Encoded, pieces: Sequence[str]) -> None:
    for position, (piece, mask) in enumerate(zip(pieces, one.loss_mask, strict=True)):
        text.append(piece.replace("\n", BREAK), (SUPERVISED if mask else GIVEN)[position % 2])


def _plain(text: Text, one: Encoded, pieces: Sequence[str]) -> None:
    masks = [*one.loss_mask, 1]
    for piece, (mask, after) in zip(pieces, pairwise(masks), strict=True):
        shown = piece.replace("\n", BREAK)
        text.append(f"[{shown}]" if mask else shown if after else f"{shown}|")


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds, special tokens included. Of several tokens that make one character, the last one
    shows it.
    """
    out, start, last = [], 0, 0
    for end in range(1, len(ids) + 1):
        # With the token before it, whose space the decoder may swallow at the beginning of a text.
        before = tokenizer.decode(ids[last:start], clean_up_tokenization_spaces=False)
        both = tokenizer.decode(ids[last:end], clean_up_tokenization_spaces=False)
        if both.endswith("�") and end < len(ids):
            out.append("")
            continue
        alone = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        out.append(both[len(before) :] if both.startswith(before) else alone)
        last, start = start, end
    return out
