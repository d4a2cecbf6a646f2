"""Conversations from JSONL, JSON, parquet and other files, folders of them, or a dataset of the Hugging Face hub.
Five row formats become one Conversation each; a row that does not fit ends with its file and line, never in silence."""

import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drafttrain.data.chat_messages import DataError, Message, keys, parse_tools, parse_turns, short, text_value
from drafttrain.recipe import DataEntry

Row = Mapping[str, Any]

PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
EXPECTED = (
    "messages or conversations (a list of turns), input_ids, prompt and completion (question and answer, "
    "instruction and output), or text"
)
HUB_SECONDS = 5


@dataclass(frozen=True)
class Conversation:
    """One row of data in exactly one form: messages, text, prompt (and completion), or input_ids (and loss_mask).

    messages: turns as in chat_messages.Message, alternating; tools: what they may call; refused: why no text model can
    be asked them (an image in them), or None; input_ids: token ids; loss_mask: 0 or 1 for each id; source: where the
    row came from, as "file.jsonl:12"; domain: the row's category, or the name of its entry.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None
    source: str = ""
    domain: str = field(default="", compare=False)
    tools: tuple[dict[str, Any], ...] | None = None
    refused: str | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether tools are offered, called or heard."""
        return bool(self.tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in self.messages or ())


def load_conversations(entries: Sequence[DataEntry], seed: int, key: str = "") -> list[Conversation]:
    """All rows of `entries` in order. `weight` < 1 keeps a sample without replacement, > 1 repeats whole passes and
    samples the rest; the choice depends only on `seed` and the entry's place in the list.

    Raises DataError for anything unreadable, unknown or empty, naming file and line; for a missing file also the
    recipe's key, where `key` says which list this is (data.train).
    """
    loaded: list[Conversation] = []
    for index, entry in enumerate(entries):
        where = entry.path or entry.dataset
        if key and entry.path is not None and not Path(entry.path).exists():
            raise DataError(f"{key}.{index}.path: {_no_file(where)}")
        name = entry.name or entry.dataset or Path(entry.path).stem
        rows = [_of_domain(parse_row(row, entry.format, source), row, name) for row, source in read_entry(entry)]
        if not rows:
            raise DataError(f"{where}: found no rows, expected at least one; check the file's content or the split")
        kept = _apply_weight(rows, entry.weight, random.Random(f"{seed}:{index}"))
        if not kept:
            raise DataError(
                f"{where}: nothing left of {len(rows)} rows at weight {entry.weight:g}; raise the entry's weight"
            )
        loaded += kept
    if not loaded:
        raise DataError("no conversations: the list of data entries is empty; add an entry with path or dataset")
    return loaded


def _no_file(path: str) -> str:
    return f"{path}: found no such file or folder; check the path (it is relative to the recipe)"


def _of_domain(conversation: Conversation, row: Row, name: str) -> Conversation:
    category = row.get("category")
    return replace(conversation, domain=category if isinstance(category, str) and category else name)


def _apply_weight(rows: list[Conversation], weight: float, rng: random.Random) -> list[Conversation]:
    passes = int(weight)
    sample = rng.sample(range(len(rows)), round((weight - passes) * len(rows)))
    return rows * passes + [rows[i] for i in sorted(sample)]


# Reading: every reader yields (row, source).


def read_entry(entry: DataEntry) -> Iterator[tuple[Row, str]]:
    if entry.path is None:
        yield from _read_hub(entry)
        return
    path = Path(entry.path)
    if not path.exists():
        raise DataError(_no_file(entry.path))
    if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        yield from _read_saved(path, entry.split)
        return
    for file in _data_files(path):
        if file.suffix in LINE_SUFFIXES:
            yield from _read_json(file)
        else:
            yield from _read_built(file)


def _data_files(path: Path) -> list[Path]:
    known = (*LINE_SUFFIXES, *BUILDERS)
    if path.is_file():
        if path.suffix not in known:
            raise DataError(f"{path}: found a {path.suffix or 'suffix-less'} file, expected one of {', '.join(known)}")
        return [path]
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in known)
    if not files:
        raise DataError(f"{path}: found a folder without data files, expected some of {', '.join(known)}")
    return files


def _read_json(path: Path) -> Iterator[tuple[Row, str]]:
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not raw.strip():
        raise DataError(f"{path}: found an empty file, expected at least one row")
    if path.suffix == ".json" and raw.lstrip().startswith(b"["):
        rows = _parse_json(raw, lambda line: f"{path}:{line}")
        yield from ((row, f"{path}:row {number}") for number, row in enumerate(rows, start=1))
        return
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            yield _parse_json(line, lambda _, number=number: f"{path}:{number}"), f"{path}:{number}"


def _parse_json(raw: bytes, place: Callable[[int], str]) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{place(line)}: found bytes that are not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place(error.lineno)}: broken JSON ({error.msg} at column {error.colno}), expected one JSON object a "
            "line; mend or remove the line"
        ) from error


def _read_built(path: Path) -> Iterator[tuple[Row, str]]:
    import datasets

    builder = BUILDERS[path.suffix]
    yield from _rows(
        _load(
            lambda: datasets.load_dataset(builder, data_files=str(path), split="train"),
            str(path),
            f"a {builder} file that can be read",
        ),
        str(path),
    )


def _read_saved(path: Path, split: str) -> Iterator[tuple[Row, str]]:
    import datasets

    found = _load(lambda: datasets.load_from_disk(str(path)), str(path), "a folder of Dataset.save_to_disk")
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(f"{path}: found no split {split!r}, expected one of {', '.join(found)}; set the split")
        found = found[split]
    yield from _rows(found, str(path))


def _read_hub(entry: DataEntry) -> Iterator[tuple[Row, str]]:
    import datasets
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        _check_reachable(huggingface_hub.constants.ENDPOINT, entry.dataset)
    name = f"{entry.dataset}[{entry.split}]"
    expected = "a dataset id of the hub that has this name and split (set HF_TOKEN for a gated one)"
    found = _load(lambda: datasets.load_dataset(entry.dataset, entry.name, split=entry.split), name, expected)
    yield from _rows(found, name)


def _check_reachable(endpoint: str, dataset: str) -> None:
    # `datasets` retries an unreachable hub for half a minute; one probe says so at once. Any HTTP answer will do.
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except OSError as error:
        raise DataError(
            f"{dataset}: the hub at {endpoint} cannot be reached ({error}); connect, set HF_HUB_OFFLINE=1 to use what "
            "is already in the cache, or give a local file with path:"
        ) from error


def _load(load: Callable[[], Any], name: str, expected: str) -> Any:
    import datasets

    try:
        return load()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).splitlines()
        raise DataError(f"{name}: {reason[0] if reason else type(error).__name__}; expected {expected}") from error


def _rows(dataset: Iterable[Row], name: str) -> Iterator[tuple[Row, str]]:
    return ((row, f"{name}:row {number}") for number, row in enumerate(dataset, start=1))


# Parsing: one row -> one Conversation.


def parse_row(row: Row, format: str, source: str) -> Conversation:
    """One row as a Conversation; `format` as in DataEntry, "auto" decides by the row's keys.

    Raises DataError naming `source` when the row does not fit.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{source}: found {type(row).__name__}, expected an object with {EXPECTED}")
    row = {key: value for key, value in row.items() if value is not None}
    match _detect(row, source) if format == "auto" else format:
        case "messages" | "sharegpt" as kind:
            turns = _need(row, ("messages", "conversations"), source)
            messages, refused = parse_turns(turns, kind, source)
            tools = parse_tools(row.get("tools"), f"{source}: tools")
            return Conversation(messages=messages, tools=tools, refused=refused, source=source)
        case "prompt_completion":
            return _parse_pair(row, source)
        case "text":
            return Conversation(text=text_value(_need(row, ("text",), source), f"{source}: text"), source=source)
        case "tokens":
            return _parse_tokens(row, source)
        case other:
            raise DataError(
                f"{source}: unknown format {other!r}, expected messages, sharegpt, prompt_completion, text or tokens"
            )


def _detect(row: Row, source: str) -> str:
    for key in ("messages", "conversations"):
        if key in row:
            turns = row[key]
            first = turns[0] if isinstance(turns, list) and turns else None
            return "sharegpt" if isinstance(first, Mapping) and "from" in first else "messages"
    if "input_ids" in row:
        return "tokens"
    if any(prompt in row and answer in row for prompt, answer in PAIRS):
        return "prompt_completion"
    if "text" in row:
        return "text"
    if any(prompt in row for prompt, _ in PAIRS):
        return "prompt_completion"
    raise DataError(f"{source}: found the keys {keys(row)}, expected {EXPECTED}; rename the fields")


def _parse_pair(row: Row, source: str) -> Conversation:
    whole = [pair for pair in PAIRS if pair[0] in row and pair[1] in row]
    prompt_key, answer_key = next(iter(whole or [pair for pair in PAIRS if pair[0] in row]), PAIRS[0])
    prompt = text_value(_need(row, (prompt_key,), source), f"{source}: {prompt_key}")
    if prompt_key == "instruction" and row.get("input"):
        prompt += "\n\n" + text_value(row["input"], f"{source}: input")
    completion = text_value(row[answer_key], f"{source}: {answer_key}") if answer_key in row else None
    return Conversation(prompt=prompt, completion=completion, source=source)


def _parse_tokens(row: Row, source: str) -> Conversation:
    ids = _integers(_need(row, ("input_ids",), source), f"{source}: input_ids")
    if not ids:
        raise DataError(f"{source}: found no input_ids, expected at least one token id")
    if "loss_mask" not in row:
        return Conversation(input_ids=ids, source=source)
    mask = _integers(row["loss_mask"], f"{source}: loss_mask")
    if len(mask) != len(ids):
        raise DataError(
            f"{source}: found {len(ids)} input_ids and {len(mask)} loss_mask values, expected one for each id"
        )
    if not set(mask) <= {0, 1}:
        raise DataError(f"{source}: found loss_mask values {sorted(set(mask))[:5]}, expected only 0 and 1")
    return Conversation(input_ids=ids, loss_mask=mask, source=source)


def _need(row: Row, names: tuple[str, ...], source: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise DataError(f"{source}: found the keys {keys(row)}, expected {' or '.join(names)}; set the entry's format")


def _integers(value: Any, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise DataError(f"{place}: found {short(value)}, expected a list of integers >= 0")
    return tuple(value)
