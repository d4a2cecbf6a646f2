"""Prompts to evaluate on: eight built-in categories, named sets of the hub, JSONL in Spec-Bench or messages form.
A row of several turns is asked turn by turn, each later one after the answers that came before it."""

import difflib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import prompt_ids
from drafttrain.data.chat_answers import answer_message
from drafttrain.data.chat_messages import Message
from drafttrain.data.chat_template import AnyChat, use_template
from drafttrain.data.conversations import Conversation, DataError, Row, parse_row, read_entry, text_value
from drafttrain.evaluate.long_context import long_prompts
from drafttrain.evaluate.report import EvaluationError
from drafttrain.recipe import DataEntry
from drafttrain.target import Target

PROMPTS = Path(__file__).parent / "prompts"
BUILTIN = "builtin"
CATEGORIES = ("chat", "code", "math", "summarising", "translation", "extraction", "json_tools", "long_context")
HUB_SETS = {
    "mt-bench": {"dataset": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
    "humaneval": {"dataset": "openai/openai_humaneval", "split": "test"},
    "gsm8k": {"dataset": "openai/gsm8k", "name": "main", "split": "test"},
}
SPEC_BENCH = "spec-bench"
SPEC_BENCH_FILE = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
NAMES = (BUILTIN, *HUB_SETS, SPEC_BENCH)

ASKED = ("turns", "messages", "conversations", "prompt", "question", "instruction", "text")
IDS = ("id", "question_id", "prompt_id", "task_id")
COMPLETE = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a set.

    id: unique in the set; category: what it is reported under; messages: the conversation up to the first answer that
    the target gives; text: what to go on with where no chat template is used (the only form when messages is None);
    turns: the user's later turns, still to come; tools: what the target is offered to call.
    """

    id: str
    category: str | None
    messages: tuple[Message, ...] | None
    text: str | None
    turns: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None


def load_prompt_set(
    name_or_path: str | Path, count: int | None = None, seed: int = 0, categories: Sequence[str] | None = None
) -> list[PromptRow]:
    """The rows of a named set ("builtin", "mt-bench", "humaneval", "gsm8k"; "builtin:code,math" picks categories) or
    of a file or folder.

    A file's rows are {"turns": [...]} (Spec-Bench form), {"messages": [...]}, {"prompt": ...} or {"text": ...}, each
    with optional "id" or "question_id" and "category". Messages that end with the user's turn are asked as they are,
    recorded answers included; otherwise the target gives every answer itself. `count` rows are taken in turn from each
    category, drawn by `seed`: the same rows every time, and fewer are the first of more. None keeps all in file order.

    Raises EvaluationError for an unknown name, set or category, DataError naming file and line for a row.
    """
    if count is not None and count < 1:
        raise EvaluationError(f"found {count} prompts to take, expected at least 1")
    name, colon, chosen = str(name_or_path).partition(":")
    if name not in NAMES:
        name, colon, chosen = str(name_or_path), "", ""
    wanted = [part.strip() for part in chosen.split(",")] if colon else []
    rows = _unique(_rows(name))
    rows = _keep_categories(rows, [*wanted, *(categories or ())], name)
    return rows if count is None else _spread(rows, count, seed)


def prompt_tokens(
    row: PromptRow, target: Target, chat: AnyChat, answers: Sequence[str | list[int] | Message] = ()
) -> list[int]:
    """The token ids that the target answers at turn len(answers) + 1 of `row`, after the `answers` (text, ids or
    messages) to the turns before.

    Through the chat template where there is one and `chat` is not "none"; otherwise plain text, turns and answers
    joined by blank lines, with BOS where the tokenizer adds it. Raises DataError naming the row where the template is
    missing or refuses it, or nothing is left to feed the target.
    """
    assert len(answers) <= len(row.turns), f"{len(answers)} answers to a row of {len(row.turns) + 1} turns"
    tokenizer = _tokenizer(target)
    heard = [_message(answer, target) for answer in answers]
    try:
        if row.messages is not None and use_template(tokenizer, chat):
            messages = list(row.messages)
            for answer, turn in zip(heard, row.turns, strict=False):
                messages += [answer, {"role": "user", "content": turn}]
            ids = prompt_ids(messages, tokenizer, chat, row.tools)
        else:
            first = [m["content"] or "" for m in row.messages or ()] if row.text is None else [row.text]
            later = [part for answer, turn in zip(heard, row.turns, strict=False) for part in (answer["content"], turn)]
            whole = "\n\n".join(part for part in [*first, *later] if part)
            ids = prompt_ids([{"role": "user", "content": whole}], tokenizer, "none")
    except DataError as error:
        raise DataError(f"prompt {row.id}: {error}") from error
    if not ids:
        raise DataError(f"prompt {row.id}: found an empty prompt, expected at least one token; drop the row")
    return ids


def expand_turns(
    rows: Sequence[PromptRow], target: Target, chat: AnyChat, answer: Callable[[list[int]], str | list[int]]
) -> list[tuple[PromptRow, int, list[int]]]:
    """(row, turn counted from 1, token ids to answer) for every turn of every row, in order.

    `answer` gives the target's own answer to token ids, as text or ids; it is called once for each turn that another
    one follows.
    """
    entries = []
    for row in rows:
        answers: list[Any] = []
        for turn in range(1, len(row.turns) + 2):
            ids = prompt_tokens(row, target, chat, answers)
            entries.append((row, turn, ids))
            if turn <= len(row.turns):
                heard = answer(ids)
                answers.append(heard if isinstance(heard, str) else _message(heard, target, ids))
    return entries


def _message(answer: str | list[int] | Message, target: Target, prompt: Sequence[int] = ()) -> Message:
    if isinstance(answer, list):
        return answer_message(answer, _tokenizer(target), prompt, target.stop_ids)
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def _tokenizer(target: Target) -> PreTrainedTokenizerBase:
    if target.tokenizer is None:
        raise EvaluationError("prompts are text and the target has no tokenizer; give it one, or pass token ids")
    return target.tokenizer


# Which rows.


def _rows(name: str) -> Iterator[tuple[PromptRow, str]]:
    """(row, source) of a named set, a file or a folder."""
    if name == BUILTIN:
        for row in _builtin():
            yield parse_prompt(row, row["id"], row["id"]), row["id"]
    elif name in HUB_SETS:
        for number, (row, source) in enumerate(_hub_rows(name), start=1):
            yield _hub_prompt(name, row, source, f"{name}-{number}"), source
    elif name == SPEC_BENCH:
        raise EvaluationError(
            f"{SPEC_BENCH} is not a dataset of the hub. Download {SPEC_BENCH_FILE} and pass the file: "
            "--prompts question.jsonl"
        )
    else:
        path = Path(name).expanduser()
        if not name or not path.exists():
            raise EvaluationError(f"prompts {name!r}: {_expected(name, path)}")
        for number, (row, source) in enumerate(read_entry(DataEntry(path=str(path))), start=1):
            yield parse_prompt(row, source, f"{path.stem}-{number}"), source


def _builtin() -> Iterator[Row]:
    for category in CATEGORIES:
        if category == "long_context":
            yield from long_prompts()
        else:
            yield from (row for row, _ in read_entry(DataEntry(path=str(PROMPTS / f"{category}.jsonl"))))


def _hub_rows(name: str) -> list[tuple[Row, str]]:
    try:
        return list(read_entry(DataEntry(**HUB_SETS[name])))
    except DataError as error:
        raise EvaluationError(
            f"prompt set {name}: {error}. Without the hub: --prompts {BUILTIN}, or --prompts FILE.jsonl"
        ) from error


def _expected(name: str, path: Path) -> str:
    if path.suffix or len(path.parts) > 1:
        return f"found no such file or folder, expected one, or a named set ({', '.join(NAMES)})"
    near = difflib.get_close_matches(name.lower().replace("_", "-"), NAMES, n=1)
    return f"did you mean {near[0]}?" if near else f"expected {', '.join(NAMES)}, or a file or folder that exists"


def _unique(rows: Iterator[tuple[PromptRow, str]]) -> list[PromptRow]:
    """The rows; DataError when there is none, or two share an id, by which results of a prompt are paired."""
    seen: dict[str, str] = {}
    kept = []
    for row, source in rows:
        if row.id in seen:
            raise DataError(f"{source}: found the id {row.id!r} of {seen[row.id]} again; rename or remove the ids")
        seen[row.id] = source
        kept.append(row)
    if not kept:
        raise DataError("found no prompts, expected at least one row")
    return kept


def _keep_categories(rows: list[PromptRow], wanted: list[str], name: str) -> list[PromptRow]:
    there = list(dict.fromkeys(row.category for row in rows if row.category is not None))
    for category in wanted:
        if category not in there:
            near = difflib.get_close_matches(category, there, n=1)
            mend = f"did you mean {near[0]}?" if near else f"expected some of: {', '.join(there) or '(it has none)'}"
            raise EvaluationError(f"prompts {name}: found no category {category!r}; {mend}")
    return [row for row in rows if row.category in wanted] if wanted else rows


def _spread(rows: list[PromptRow], count: int, seed: int) -> list[PromptRow]:
    groups: dict[str | None, list[PromptRow]] = {}
    for row in rows:
        groups.setdefault(row.category, []).append(row)
    for category, group in groups.items():
        random.Random(f"{seed}:{category}").shuffle(group)
    return [row for turn in zip_longest(*groups.values()) for row in turn if row is not None][:count]


# What a row says.


def _hub_prompt(name: str, row: Row, source: str, default_id: str) -> PromptRow:
    if name == "humaneval":
        code = _said(row.get("prompt"), f"{source}: prompt")
        message = {"role": "user", "content": COMPLETE.format(code.strip("\n"))}
        return PromptRow(_id(row, source, default_id), "code", (message,), code)
    if name == "gsm8k":
        row = {**row, "category": "math"}
    return parse_prompt(row, source, default_id)


def parse_prompt(row: Any, source: str, default_id: str) -> PromptRow:
    """One row of a file as a PromptRow; `default_id` where it names none. DataError naming `source` when it does not
    fit.
    """
    if not isinstance(row, dict):
        raise DataError(f"{source}: found {type(row).__name__}, expected an object with turns, messages or prompt")
    row = {key: value for key, value in row.items() if value is not None}
    name, category = _id(row, source, default_id), row.get("category")
    if not isinstance(category, str | None):
        raise DataError(f"{source}: found the category {category!r}, expected a string")
    if not any(key in row for key in ASKED):
        found = ", ".join(map(str, row)) or "(none)"
        raise DataError(f"{source}: found the keys {found}, expected turns, messages, prompt or text; rename the field")
    turns = row.get("turns", row.get("prompt") if isinstance(row.get("prompt"), list) else None)
    if turns is not None:
        first, *later = _turns(turns, source)
        return PromptRow(name, category, ({"role": "user", "content": first},), None, tuple(later))
    return _from_conversation(parse_row(row, "auto", source), name, category)


def _from_conversation(conversation: Conversation, name: str, category: str | None) -> PromptRow:
    source = conversation.source
    if conversation.text is not None:
        return PromptRow(name, category, None, _said(conversation.text, f"{source}: text"))
    if conversation.prompt is not None:
        said = _said(conversation.prompt, f"{source}: prompt")
        return PromptRow(name, category, ({"role": "user", "content": said},), None)
    if conversation.messages is None:
        raise DataError(f"{source}: found input_ids, expected text: turns, messages, prompt or text")
    if conversation.refused:
        raise DataError(f"{source}: found {conversation.refused}, expected text; drop the row")
    messages, tools = conversation.messages, conversation.tools
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for i in users:
        _said(messages[i]["content"], f"{source}: message {i + 1}")
    if messages[-1]["role"] in ("user", "tool"):
        return PromptRow(name, category, messages, None, tools=tools)
    later = tuple(messages[i]["content"] for i in users[1:])
    if conversation.uses_tools:
        later = ()  # What the target's own calls would return is not known.
    return PromptRow(name, category, messages[: users[0] + 1], None, later, tools)


def _turns(turns: Any, source: str) -> list[str]:
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else type(turns).__name__
        raise DataError(f"{source}: found {found} for turns, expected a list of at least one string")
    return [_said(turn, f"{source}: turn {number}") for number, turn in enumerate(turns, start=1)]


def _said(value: Any, place: str) -> str:
    if not text_value(value, place).strip():
        raise DataError(f"{place}: found nothing but white space, expected something to answer; drop the row")
    return value


def _id(row: Row, source: str, default_id: str) -> str:
    for key in IDS:
        if row.get(key) is not None:
            if not isinstance(row[key], str | int) or row[key] == "":
                raise DataError(f"{source}: found {row[key]!r} for {key}, expected a string or a number")
            return str(row[key])
    return default_id
