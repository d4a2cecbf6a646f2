"""The shape of Medusa heads, and config.json as vLLM reads it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from drafttrain.drafts.base import DraftError, read_facts
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target

ARCHITECTURE = "MedusaModel"
SEQUENTIAL = "SequentialMedusaModel"
"""Sequential heads read the tokens drafted before; no engine serves them, so none may take them for plain ones."""
HEADS = 4


@dataclass(frozen=True)
class MedusaConfig:
    """hidden_size and vocab_size are the target's; draft_vocab_size words are drafted. num_hidden_layers: residual
    blocks of each head; own_heads: a vocabulary matrix for each head, else all share the target's own; sequential: a
    head also reads the embeddings of the tokens between the target's position and its own (Hydra, arXiv 2402.05109).
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = HEADS
    num_hidden_layers: int = 1
    own_heads: bool = False
    sequential: bool = False

    @classmethod
    def for_target(cls, target: Target, draft: DraftConfig, draft_vocab_size: int) -> Self:
        """Of a new draft, as the recipe's draft section says. DraftError for what no engine could read."""
        if draft.own_heads and draft_vocab_size < target.vocab_size:
            raise DraftError(
                f"draft.own_heads is true and data.draft_vocab {draft_vocab_size} of {target.vocab_size} words. "
                "Engines read a smaller draft vocabulary with the shared head only. Mend: draft.own_heads: false, or "
                "data.draft_vocab: null."
            )
        return cls(
            target.hidden_size,
            target.vocab_size,
            draft_vocab_size,
            draft.num_heads or HEADS,
            draft.num_hidden_layers or 1,
            draft.own_heads,
            draft.sequential,
        )

    @property
    def whole_vocabulary(self) -> bool:
        """Whether every word of the target is drafted."""
        return self.draft_vocab_size == self.vocab_size

    def to_json(self, dtype: torch.dtype) -> dict:
        """vLLM's config.json. No key is named like the attention of a language model: vLLM would rewrite it."""
        return {
            "architectures": [SEQUENTIAL if self.sequential else ARCHITECTURE],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.draft_vocab_size,
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "medusa_fc_bias": True,
            "original_lm_head": not self.own_heads,
            "sequential": self.sequential,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        (folder / "config.json").write_text(json.dumps(self.to_json(dtype), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """From a checkpoint folder. DraftError where it is broken, not Medusa, or says that it has no biases."""
        path = folder / "config.json"
        if not path.exists():
            raise DraftError(f"{folder} has no config.json. Expected a draft checkpoint. Mend: check the path.")
        values = read_facts(path)
        if (values.get("architectures") or [""])[0] not in (ARCHITECTURE, SEQUENTIAL):
            raise DraftError(f"{path}: architectures is {values.get('architectures')}, expected [{ARCHITECTURE!r}].")
        absent = {"truncated_vocab_size": values.get("vocab_size"), "num_hidden_layers": 1}
        values = absent | {name: value for name, value in values.items() if value is not None}
        sizes = ("hidden_size", "vocab_size", "truncated_vocab_size", "num_heads", "num_hidden_layers")
        wrong = [name for name in sizes if not isinstance(values.get(name), int) or values[name] < 1]
        if wrong:
            raise DraftError(
                f"{path}: {wrong[0]} is {values.get(wrong[0])!r}. Expected a whole number from 1 on. Mend: export the "
                "draft again."
            )
        if not values.get("medusa_fc_bias"):
            raise DraftError(
                f"{path}: medusa_fc_bias is {values.get('medusa_fc_bias')!r}. Expected true: the heads have biases, "
                "which engines drop without it, and serve at an acceptance of nothing. Mend: export the draft again."
            )
        return cls(
            *(values[name] for name in sizes),
            not values.get("original_lm_head", False),
            bool(values.get("sequential")),
        )
