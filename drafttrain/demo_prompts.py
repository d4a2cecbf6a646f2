"""Prompts for the demo without any download: starts of functions and classes of the running Python's standard library.
Whole files are held out for validation and test, and no held-out prompt begins like a training prompt."""

import json
import random
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.conversations import DataError
from drafttrain.data.files import write_beside

STDLIB = Path(sysconfig.get_path("stdlib"))
LEFT_OUT = {
    *("__pycache__", "dist-packages", "site-packages"),
    *("ensurepip", "idlelib", "lib2to3", "turtledemo", "test", "tests"),
    *("encodings", "pydoc_data"),
}
GENERATED = re.compile(r"auto[- ]?generated|generated (by|from|with)|do not edit", re.IGNORECASE)
DEFINITION = re.compile(r"^(?:    )?(?:async def|def|class) \w", re.MULTILINE)
SMALLEST = 2000  # bytes
PER_FILE = 2  # held-out prompts of one file
CHARS_PER_TOKEN = 12
OPENING = 16  # tokens that no two prompts share


def write_prompts(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    counts: Mapping[str, int],
    prompt_tokens: int = 48,
    seed: int = 0,
    source: Path | None = None,
) -> dict[str, dict[str, int]]:
    """Write train.jsonl, validation.jsonl and test.jsonl (the keys of `counts`) with rows {"prompt", "file"}.

    Each prompt is the first `prompt_tokens` tokens from a line that starts a function, class or method; encoding its
    text gives them back. Any two prompts, of whatever split, differ within their first 16 tokens, and a file serves one
    split. The same interpreter, tokenizer and seed give the same files. source: another folder of .py files than the
    standard library. Returns {split: {"prompts", "files"}}. DataError: the sources do not hold enough prompts.
    """
    root = source or STDLIB
    rng = random.Random(seed)
    files = list(python_sources(root))
    rng.shuffle(files)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = _Prompts(tokenizer, prompt_tokens, rng)
    written = {}
    # Held-out splits choose first: a training prompt that begins like one of theirs is passed over.
    for split in sorted(counts, key=lambda name: name == "train"):
        choose = prompts.in_turns if split == "train" else prompts.hold_out
        rows = choose(files, counts[split])
        if len(rows) < counts[split]:
            raise DataError(
                f"{root}: found {len(rows)} prompts for {split}, expected {counts[split]}; ask for fewer, or install "
                "the Python standard library's sources"
            )
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_beside(folder / f"{split}.jsonl", partial(_write, lines))
        written[split] = {"prompts": len(rows), "files": len({row["file"] for row in rows})}
    return {split: written[split] for split in counts}


def prompt_ids(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[list[int]]:
    """Such prompts as token ids, the BOS included, in memory alone."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder), tokenizer, {"test": count}, seed=seed)
        rows = (Path(folder) / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [list(tokenizer(json.loads(row)["prompt"])["input_ids"]) for row in rows]


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def python_sources(root: Path = STDLIB) -> Iterator[tuple[str, str]]:
    """(relative name, text) of the files worth reading, in the order of their names."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT.isdisjoint(name.parts[:-1]) or name.name.startswith(("test_", "_sysconfigdata")):
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue  # One of the few files that declare another encoding.
        if len(raw) >= SMALLEST and not GENERATED.search(text[:1000]):
            yield name.as_posix(), text


class _Prompts:
    """Chooses prompts and remembers how each begins."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, rng: random.Random):
        self.tokenizer, self.prompt_tokens, self.rng = tokenizer, prompt_tokens, rng
        self.seen: set[tuple[int, ...]] = set()

    def hold_out(self, files: list[tuple[str, str]], count: int) -> list[dict[str, str]]:
        """Up to `count` rows, at most PER_FILE of a file; `files` loses those that were tried."""
        rows: list[dict[str, str]] = []
        while files and len(rows) < count:
            name, text = files.pop(0)
            rows += islice(self._of_file(name, text), min(PER_FILE, count - len(rows)))
        return rows

    def in_turns(self, files: list[tuple[str, str]], count: int) -> list[dict[str, str]]:
        """Up to `count` rows, one of every file, then a second of every file, and so on."""
        rows: list[dict[str, str]] = []
        waiting = [self._of_file(name, text) for name, text in files]
        while waiting and len(rows) < count:
            found = [(row, of_file) for of_file in waiting for row in islice(of_file, 1)]
            rows += [row for row, _ in found]
            waiting = [of_file for _, of_file in found]
        return rows[:count]

    def _of_file(self, name: str, text: str) -> Iterator[dict[str, str]]:
        places = [match.start() for match in DEFINITION.finditer(text)]
        self.rng.shuffle(places)
        for place in places:
            prompt = self._cut(text[place : place + CHARS_PER_TOKEN * self.prompt_tokens])
            if prompt is not None:
                yield {"prompt": prompt, "file": name}

    def _cut(self, excerpt: str) -> str | None:
        """Its first `prompt_tokens` tokens as text; None if it is too short, the cut moves tokens, or it is no news."""
        ids = self._encode(excerpt)[: self.prompt_tokens]
        opening = tuple(ids[:OPENING])
        if len(ids) < self.prompt_tokens or opening in self.seen:
            return None
        prompt = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if self._encode(prompt) != ids:
            return None
        self.seen.add(opening)
        return prompt

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
