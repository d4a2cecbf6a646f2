"""A second reader of Medusa exports, written after vLLM 0.32's."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.tiny_models import V


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


class Reader:
    """vLLM 0.32's reading, in short: any key with "num" and "heads" or "layers" is the number of those, the request's K
    sets the number of heads, names of the first release are rewritten, names that are not wanted are passed over,
    missing ones are an error, biases are there iff the config says so."""

    def __init__(self, folder, k: int, vocab_size: int = V):
        values = config_of(folder)
        for key in [key for key in values if "num" in key]:
            kind = "heads" if "heads" in key else "layers" if "layers" in key else key
            values[kind] = values.pop(key)
        self.k, self.layers, self.bias = k, values["layers"], values.get("medusa_fc_bias", False)
        self.shared, self.vocab_size = values.get("original_lm_head", False), values["vocab_size"]
        self.words = values.get("truncated_vocab_size", self.vocab_size)
        if self.vocab_size != vocab_size:  # As for files of the first release, which do not say.
            self.vocab_size = self.words = vocab_size
        (path,) = folder.glob("*.safetensors")
        found = {self.renamed(name): tensor for name, tensor in load_file(path).items()}
        self.map = found.get("token_map") if self.words < self.vocab_size else None
        assert self.words == self.vocab_size or self.map is not None
        self.tensors = {name: found[name] for name in self.wanted()}
        for name, tensor in self.tensors.items():
            if "lm_head" in name and self.map is not None and len(tensor) > len(self.map):
                self.tensors[name] = tensor[self.map]

    @staticmethod
    def renamed(name: str) -> str:
        parts = name.split(".")
        if not (len(parts) >= 3 and parts[0].isdigit() and parts[1].isdigit()):
            return name
        if "linear" in parts:
            return f"blocks.{parts[0]}.layers.{parts[1]}.{parts[-1]}"
        return f"lm_heads.{parts[0]}.{parts[-1]}"

    def wanted(self) -> list[str]:
        leaves = ["weight", "bias"] if self.bias else ["weight"]
        blocks = [f"blocks.{i}.layers.{j}" for i in range(self.k) for j in range(self.layers)]
        heads = ["lm_head.weight"] if self.shared else [f"lm_heads.{i}.weight" for i in range(self.k)]
        return [f"{block}.{leaf}" for block in blocks for leaf in leaves] + heads

    def drafts(self, hidden) -> torch.Tensor:
        """The target's normed states [n, H] -> each head's first choice, [n, k]."""
        out = []
        for i in range(self.k):
            x = hidden
            for j in range(self.layers):
                name = f"blocks.{i}.layers.{j}"
                x = x + F.silu(F.linear(x, *(self.tensors.get(f"{name}.{leaf}") for leaf in ("weight", "bias"))))
            z = x @ self.tensors["lm_head.weight" if self.shared else f"lm_heads.{i}.weight"].T
            if self.map is not None:
                whole = torch.full((len(z), self.vocab_size), -torch.inf)
                whole[:, self.map] = z.float()
                z = whole
            out.append(z.argmax(-1))
        return torch.stack(out, 1)
