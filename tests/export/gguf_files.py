"""Targets with a byte-level tokenizer, which a GGUF file can hold, and a reader of what was written."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from drafttrain.export.gguf import FILE
from drafttrain.target import Target
from tests.data.chat_tokenizers import BYTES, CHATML, CORPUS, SPECIALS
from tests.tiny_models import make_model

WORDS, ROWS = 307, 312
"""Of the tokenizer, and of the padded vocabulary."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
RULES = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(SPLIT.replace("NUMBER", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(SPLIT.replace("NUMBER", "{1,3}")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def tokenizer_of(rule: str = "gpt-2", adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 307 words that splits text by one of llama.cpp's rules. Its merges know digits and capitals."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = RULES["gpt-2"][0], decoders.ByteLevel()
    size = len(SPECIALS) + len(BYTES) + 40
    options = {"special_tokens": SPECIALS, "initial_alphabet": BYTES, "vocab_size": size, "show_progress": False}
    inner.train_from_iterator([*CORPUS, *["12345 123 45 IT'S WE'LL"] * 20], trainers.BpeTrainer(**options))
    inner.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    inner.pre_tokenizer = pre_tokenizers.Sequence(RULES[rule]) if len(RULES[rule]) > 1 else RULES[rule][0]
    inner.model.ignore_merges = rule == "llama-bpe"
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="</s>")
    tokenizer.chat_template = CHATML
    assert len(tokenizer) == WORDS
    return tokenizer


def make_target(family: str = "Llama", tokenizer=None, **changes) -> Target:
    model = make_model(family, vocab_size=ROWS, max_position_embeddings=256, **changes)
    return Target.from_model(model, tokenizer or tokenizer_of(), name=f"tiny {family}")


def read(folder: Path) -> tuple[dict, dict[str, np.ndarray], dict[str, str]]:
    """(keys, tensors in rows and columns as torch has them, their types) of draft.gguf."""
    reader = gguf.GGUFReader(folder / FILE)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    return keys, tensors, {t.name: t.tensor_type.name for t in reader.tensors}
