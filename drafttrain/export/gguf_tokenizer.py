"""The tokenizer of a target as the keys of a GGUF file: copied from the target's own file, or made of its tokenizer.

llama.cpp knows splitting rules by name alone, so a byte-level BPE tokenizer is written only where its rule is one of
those known here, and a SentencePiece one only with its tokenizer.model, which holds the scores.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafttrain.export.base import ExportError
from drafttrain.target import Target

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BPE_MODEL = 2
"""SentencePiece's trainer_spec.model_type; llama.cpp's "llama" tokenizer merges as that one does."""
PAD_SCORE = -1000.0
SPECIALS = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {WORDS + r"\p{N}{1,3}" + REST: "llama-bpe", WORDS + r"\p{N}" + REST: "qwen2"}
"""The rule of Llama 3 takes up to three digits together, that of Qwen 2 and 3 each for itself."""
WHOLE_FIRST = ("llama-bpe",)
"""Rules with which llama.cpp takes a piece that is a word of the vocabulary before any merge."""
MEND = (
    "Mend: give the target as a .gguf file, whose tokenizer is copied, or run llama.cpp's convert_hf_to_gguf.py on a "
    "folder of --engine transformers."
)


def tokenizer_keys(target: Target, rows: int) -> dict[str, Any]:
    """tokenizer.* for a vocabulary of `rows`, padded with unused words. ExportError where it cannot be said exactly."""
    source = Path(target.name).expanduser()
    if source.suffix == ".gguf" and source.is_file():
        keys = _copied(source)
    elif target.tokenizer is None:
        raise ExportError(f"{target.title} has no tokenizer, which a GGUF file holds. {MEND}")
    else:
        keys = _made(target)
    tokens = keys["tokenizer.ggml.tokens"]
    if len(tokens) > rows:
        raise ExportError(
            f"the tokenizer of {target.title} has {len(tokens)} words, the draft {rows}. Expected as many rows at "
            "least. Mend: export the draft for the target it was trained for."
        )
    missing = range(len(tokens), rows)
    tokens.extend(f"[PAD{i}]" for i in missing)
    keys["tokenizer.ggml.token_type"].extend(UNUSED for _ in missing)
    if "tokenizer.ggml.scores" in keys:
        keys["tokenizer.ggml.scores"].extend(PAD_SCORE for _ in missing)
    return keys


def _copied(path: Path) -> dict[str, Any]:
    """The very keys of the target's own file."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def _made(target: Target) -> dict[str, Any]:
    tokenizer = target.tokenizer
    whole = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {"type": None}}
    model = whole["model"]
    if model["type"] != "BPE":
        raise ExportError(
            f"the tokenizer of {target.title} is of type {model['type'] or 'slow'}. Expected BPE, byte-level or of "
            f"SentencePiece. {MEND}"
        )
    texts, kinds = _words(whole, len(tokenizer))
    if model.get("byte_fallback"):
        keys = _sentencepiece(target, texts, kinds)
    else:
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        keys = {"model": "gpt2", "pre": _pre(whole, target), "merges": merges}
    ids = list(tokenizer("a")["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    keys |= {"tokens": texts, "token_type": kinds}
    keys |= {f"{name}_token_id": getattr(tokenizer, attribute) for name, attribute in SPECIALS.items()}
    keys["add_bos_token"] = ids != bare and ids[0] == tokenizer.bos_token_id
    keys["add_eos_token"] = ids != bare and ids[-1] == tokenizer.eos_token_id
    out = {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}
    if isinstance(tokenizer.chat_template, str):
        out["tokenizer.chat_template"] = tokenizer.chat_template
    return out


def _words(whole: dict[str, Any], count: int) -> tuple[list[str], list[int]]:
    """Every word's text and kind by its id; ids without a word are unused."""
    texts, kinds = [f"[PAD{i}]" for i in range(count)], [UNUSED] * count
    for text, i in whole["model"]["vocab"].items():
        texts[i], kinds[i] = text, NORMAL
    for added in whole["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return texts, kinds


def _pre(whole: dict[str, Any], target: Target) -> str:
    """llama.cpp's name of the splitting rule. Unicode normalisation (NFC) has no key there: text is taken as it is."""
    model, steps = whole["model"], whole.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    normalizer = (whole.get("normalizer") or {"type": "NFC"})["type"]
    plain = not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    *first, last = steps
    byte_level = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    own_rule = byte_level and last.get("use_regex", True)
    kinds = [step.get("type") for step in first]
    name = None
    if own_rule and not first:
        name = "gpt-2"
    elif own_rule and kinds == ["Digits"] and first[0].get("individual_digits"):
        name = "smollm"
    elif byte_level and not own_rule and kinds == ["Split"]:
        split = first[0]
        if split["behavior"] == "Isolated" and not split.get("invert"):
            name = SPLITS.get(split["pattern"].get("Regex"))
    if name is None or not plain or normalizer != "NFC" or bool(model.get("ignore_merges")) != (name in WHOLE_FIRST):
        raise ExportError(
            f"the tokenizer of {target.title} splits text by {json.dumps(steps)[:300]}. Expected the rule of GPT-2, "
            f"Llama 3, Qwen 2 or SmolLM, which llama.cpp has under a name. {MEND}"
        )
    return name


def _sentencepiece(target: Target, texts: list[str], kinds: list[int]) -> dict[str, Any]:
    """Scores and kinds of the pieces from tokenizer.model, which the fast tokenizer has lost."""
    path = None if target.folder is None else target.folder / "tokenizer.model"
    if path is None or not path.is_file():
        raise ExportError(
            f"{target.title} has a SentencePiece tokenizer and no tokenizer.model. Expected that file in the target's "
            f"folder: it holds the scores of the words. {MEND}"
        )
    pieces, kind = read_sentencepiece(path.read_bytes())
    different = next((i for i, (text, _, _) in enumerate(pieces) if i >= len(texts) or texts[i] != text), None)
    # Words that were renamed after the training keep their places: unused ones became special tokens.
    if kind != BPE_MODEL or (different is not None and (different >= len(texts) or kinds[different] == NORMAL)):
        raise ExportError(
            f"{path} holds other words than {target.title}'s tokenizer, or no BPE model. Expected the file that the "
            f"tokenizer was made of. {MEND}"
        )
    scores = [PAD_SCORE] * len(texts)
    for i, (_, score, piece_kind) in enumerate(pieces):
        if kinds[i] == NORMAL:
            scores[i], kinds[i] = score, piece_kind
    bare = target.tokenizer("a", add_special_tokens=False)["input_ids"]
    prefixed = target.tokenizer.convert_ids_to_tokens(bare[:1])[0].startswith("\u2581")
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefixed}


def read_sentencepiece(data: bytes) -> tuple[list[tuple[str, float, int]], int]:
    """([(piece, score, kind)], model type) of a tokenizer.model, a protocol buffer."""
    pieces, kind = [], 1
    for number, value in _fields(data):
        if number == 1:
            found = {1: b"", 2: b"\0\0\0\0", 3: NORMAL} | dict(_fields(value))
            pieces.append((found[1].decode(), struct.unpack("<f", found[2])[0], found[3]))
        elif number == 2:
            kind = dict(_fields(value)).get(3, 1)
    return pieces, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protocol buffer message: bytes, or the int of a varint."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7) or varint()
        yield tag >> 3, data[at : at + size]
        at += size
