"""`drafttrain convert`: a draft in another layout, tensor by tensor the same.

EAGLE-3: the engines' form (ours), speculators' (layers.0.*, nested settings) and SafeAILab's (legacy: the same names in
pytorch_model.bin, LlamaForCausalLM). Medusa heads: vLLM's form (ours) and that of their first release (legacy).
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.data.files import replace_folder
from drafttrain.drafts.eagle3 import read_map
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_files import PICKLED, WEIGHTS, read_tensors
from drafttrain.drafts.medusa import SHARED, TREE_FILE
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.export.base import ExportError, check_place
from drafttrain.export.check import method_of
from drafttrain.export.check_files import StoredDraft, TargetFacts
from drafttrain.export.check_medusa import MedusaView
from drafttrain.export.medusa import ORIGINAL, original_config
from drafttrain.target_files import TOKENIZER_FILES

FORMS = {"eagle3": ("ours", "speculators", "legacy"), "medusa": ("ours", "legacy")}
SPECULATORS_VERSION = "0.9.0"
INNER = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "sliding_window", "layer_types"),
)
"""Settings that speculators nest in transformer_layer_config; the others of theirs stay at the top."""
OUTER = (
    *("draft_vocab_size", "norm_before_residual", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
    *("norm_before_fc", "fc_norm", "norm_output"),
)
BESIDE = ("drafttrain.json", "README.md", TREE_FILE, *TOKENIZER_FILES)
"""Files that travel as they are."""


@dataclass
class _Eagle3:
    """An EAGLE-3 draft between two layouts: `tensors` under the engines' names, t2d included where there is a d2t."""

    config: Eagle3Config
    tensors: dict[str, Tensor]
    target: TargetFacts
    k: int

    @property
    def settings(self) -> dict[str, Any]:
        """The engines' config.json, in the stored dtype."""
        return self.config.to_json(self.tensors["fc.weight"].dtype)


def convert_draft(name_or_path: str, to: str, output: Path, target: str, k: int = 3) -> dict[str, Any]:
    """Write the draft in `output` in another layout; the folder is written whole or not at all.

    to: ours, speculators or legacy. k: drafts a round that speculators' form names. Returns folder, method, form and
    notes. Raises DraftError where the source cannot be read or uses what this package does not build, ExportError where
    the form cannot hold it or it is not this target's.
    """
    draft, facts = StoredDraft.open(name_or_path), TargetFacts.read(target)
    method = method_of(draft)
    forms = FORMS.get(method, ())
    if to not in forms:
        raise ExportError(
            f"--to is {to!r} for a draft of method {method}. Expected {' or '.join(forms) or 'an EAGLE-3 draft'}: "
            "small drafts have one layout. Mend: another --to, or none."
        )
    fill = _eagle3(draft, to, facts, k) if method == "eagle3" else _medusa(draft, to, facts)
    _check_place(draft.folder, output)

    def write(folder: Path) -> None:
        fill(folder)
        for name in BESIDE:
            if (draft.folder / name).is_file():
                shutil.copyfile(draft.folder / name, folder / name)

    replace_folder(output, write)
    notes = _notes(draft, to, facts) if method == "eagle3" else []
    return {"folder": str(output), "method": method, "form": to, "notes": notes}


def _check_place(source: Path, output: Path) -> None:
    check_place(output, {"config.json", WEIGHTS, PICKLED, ORIGINAL, *BESIDE}, "conversion")
    if output.resolve() in (source.resolve(), *source.resolve().parents):
        raise ExportError(
            f"{output} holds the source; expected a new or empty folder, or a former conversion, which is replaced. "
            "Mend: give another --output."
        )


def _notes(draft: StoredDraft, to: str, target: TargetFacts) -> list[str]:
    """What the form's own trainer would read otherwise."""
    n = target.num_layers
    ids, defaults = list(Eagle3Config.load(draft.folder, n).feature_layers), [2, n // 2, n - 3]
    if to == "legacy" and ids != defaults:
        return [f"SafeAILab's own code captures {defaults} whatever the config says; this draft reads {ids}"]
    return []


# EAGLE-3.


def _eagle3(draft: StoredDraft, to: str, target: TargetFacts, k: int) -> Callable[[Path], None]:
    config, tensors = Eagle3Config.load(draft.folder, target.num_layers), read_tensors(draft.folder)
    found, expected = (config.vocab_size, config.target_hidden_size), (target.vocab_size, target.hidden_size)
    if found != expected or max(config.feature_layers) > target.num_layers:
        raise ExportError(
            f"{draft.folder} has vocabulary {found[0]}, features of {found[1]} and layer {max(config.feature_layers)}; "
            f"{target.name} has {expected[0]}, {expected[1]} and {target.num_layers} layers. Expected the draft's own "
            "target. Mend: --target"
        )
    if "feature_rms" in tensors:
        raise ExportError(
            f"{draft.folder} holds masters, whose scales are not folded in. Expected an export. Mend: drafttrain export"
        )
    if config.draft_vocab_size < config.vocab_size and "d2t" in tensors:
        ids = read_map(tensors["d2t"], config, draft.folder)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    else:
        tensors.pop("d2t", None)
    writers = {"ours": _write_ours, "speculators": _write_speculators, "legacy": _write_legacy}
    form = _Eagle3(config, {name: tensor.contiguous() for name, tensor in tensors.items()}, target, k)
    return lambda folder: writers[to](form, folder)


def _write_ours(form: _Eagle3, folder: Path) -> None:
    _save(form.tensors, form.settings, folder)


def _write_speculators(form: _Eagle3, folder: Path) -> None:
    """speculators 0.9 and vLLM read this form. vLLM takes the number of features from the nested settings."""
    settings = form.settings
    inner = {key: settings[key] for key in INNER if key in settings}
    if settings["num_aux_hidden_states"] != 3:
        inner["num_aux_hidden_states"] = settings["num_aux_hidden_states"]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **{key: settings[key] for key in OUTER},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": settings["torch_dtype"],
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": form.k}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": form.target.name, "architectures": form.target.architectures},
        },
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in form.tensors.items()}
    _save(tensors, config, folder)


def _write_legacy(form: _Eagle3, folder: Path) -> None:
    """SafeAILab's: their loader keeps settings that it does not know."""
    torch.save(form.tensors, folder / PICKLED)
    _write_config(form.settings | {"architectures": ["LlamaForCausalLM"]}, folder)


def _save(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path, name: str = WEIGHTS) -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})
    _write_config(config, folder)


def _write_config(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# Medusa heads.


def _medusa(draft: StoredDraft, to: str, target: TargetFacts) -> Callable[[Path], None]:
    view = MedusaView(draft, target)
    shape, count, layers = view.shape("blocks.0.layers.0.weight"), view.stored_heads, view.num_layers
    if shape is None or shape[0] != target.hidden_size:
        raise ExportError(
            f"{draft.folder} has layers of shape {shape}, {target.name} states of {target.hidden_size}. Expected the "
            "heads' own target. Mend: --target"
        )
    if "blocks.0.layers.0.bias" not in view.names:
        raise ExportError(
            f"{draft.folder} has no biases. Expected heads with biases, as this package and engines read them. Mend: "
            "add biases of zero."
        )
    tensors = {name: draft.tensor(stored) for name, stored in view.names.items()}
    if "input_rms" in tensors:
        raise ExportError(
            f"{draft.folder} holds masters, whose scales are not folded in. Expected an export. Mend: drafttrain export"
        )
    if to == "legacy":
        return lambda folder: _write_first_form(tensors, view, count, layers, folder)
    return lambda folder: _write_vllm(tensors, view, count, layers, folder)


def _write_first_form(tensors: dict[str, Tensor], view: MedusaView, count: int, layers: int, folder: Path) -> None:
    if "token_map" in tensors or view.values.get("sequential"):
        raise ExportError(
            f"{view.draft.folder} has a smaller draft vocabulary or sequential heads. Expected plain heads over the "
            "whole vocabulary: the first form has nothing else. Mend: keep vLLM's form."
        )
    out = {}
    for i in range(count):
        for j in range(layers):
            for leaf in ("weight", "bias"):
                out[f"{i}.{j}.linear.{leaf}"] = tensors[f"blocks.{i}.layers.{j}.{leaf}"].contiguous()
        # Clones: safetensors refuses one tensor under several names.
        own = tensors.get(f"lm_heads.{i}.weight")
        out[f"{i}.{layers}.weight"] = (tensors[SHARED] if own is None else own).clone()
    name = view.draft.facts.get("target", view.target.name)
    config = original_config(count, layers, name, view.target.hidden_size, view.target.vocab_size)
    _save(out, config, folder, ORIGINAL)


def _write_vllm(tensors: dict[str, Tensor], view: MedusaView, count: int, layers: int, folder: Path) -> None:
    """Heads that are all the same matrix become the shared one."""
    heads = [name for name in tensors if name.startswith("lm_heads.")]
    same = bool(heads) and all(torch.equal(tensors[heads[0]], tensors[name]) for name in heads)
    if same:
        tensors[SHARED] = tensors[heads[0]]
    out = {name: x.contiguous() for name, x in tensors.items() if not (same and name.startswith("lm_heads."))}
    config = MedusaConfig(
        view.target.hidden_size, view.target.vocab_size, view.words, count, layers, own_heads=SHARED not in out
    )
    _save(out, config.to_json(out["blocks.0.layers.0.weight"].dtype), folder)
