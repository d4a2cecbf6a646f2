"""The frozen target: loading (folder, hub, GGUF), hs[k] by forward hooks, and the rows of its head.

hs[k] is the residual stream after k decoder layers: hs[0] the embedding output, hs[n] BEFORE the final norm."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.nn.cache import RaggedCache, additive, visible, visible_tree
from drafttrain.nn.tree import ancestors, deepest, depths
from drafttrain.target_files import (
    TargetError,
    add_part,
    cache_folder,
    choose_device,
    choose_dtype,
    find_folder,
    fingerprint_folder,
    load_tokenizer,
    read_config,
    read_model,
    read_tokenizer,
)
from drafttrain.target_head import TargetHead, first_value, logit_shape
from drafttrain.target_shards import Shards, in_turns, mesh_here, processes_here
from drafttrain.target_support import ATTENTION, KNOWN, check_supported

__all__ = [
    "Target",
    "TargetError",
    "TargetHead",
    "TargetStep",
    "cache_folder",
    "check_feature_layers",
    "default_feature_layers",
    "load_target",
    "load_tokenizer",
]

END_OF_TURN = ("<end_of_turn>", "<turn|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>")
FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "embedding_norm")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon")
UNSCALED_ROPES = ("default", "proportional")
"""proportional: Gemma 4 turns only some channels of its wide heads; a draft has heads of its own and turns all."""
ROPE_KEYS = (
    *("rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor"),
)
"""Of a target's rope_parameters, what scales rotary positions; Ministral 3 keeps other settings there too."""


def default_feature_layers(num_layers: int) -> list[int]:
    """[2, n//2, n-3], the ids the engines take by default; TargetError for n < 7, where they are not distinct."""
    if num_layers < 7:
        raise TargetError(
            f"The target has {num_layers} layers and the default features [2, n//2, n-3] are distinct only from 7 on. "
            f"Mend: give features.layers, ascending within 0..{num_layers}."
        )
    return [2, num_layers // 2, num_layers - 3]


def check_feature_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """The ids as a list; TargetError unless they ascend, are distinct and lie within 0..n."""
    ids = list(layers)
    ascending = all(low < high for low, high in pairwise(ids))
    if not ids or not ascending or ids[0] < 0 or ids[-1] > num_layers:
        raise TargetError(
            f"features.layers is {ids}. Expected ascending distinct numbers within 0..{num_layers}: k means the "
            f"residual stream after k of the target's {num_layers} layers."
        )
    return ids


@dataclass
class TargetStep:
    """One forward of the target over N new tokens of each row, and what drafts read from it.

    tokens, positions int64 [B, N]; lengths int64 [B]: the real tokens of each row; logits [B, N, V] raw ([B, 1, V],
    each row's last real token, after a prefill); features [B, N, A*Ht] of the asked layers, ascending; last_hidden
    [B, N, Ht] = hs[n] un-normed. What lies beyond `lengths` is padding."""

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    logits: Tensor
    features: Tensor | None
    last_hidden: Tensor


class Target:
    """A frozen causal language model and what the toolkit reads from it. Not an nn.Module: no draft can own it.

    model, tokenizer, config (the TEXT config), name, folder (None for a model in memory), num_layers n, hidden_size Ht,
    vocab_size V (the config's, padding included), dtype, device, decoder (backbone of embed_tokens, layers and norm),
    layers, final_norm, embed_weight [V, Ht] (the raw table, unscaled), lm_head_weight [V, Ht], stop_ids,
    max_positions, rms_norm_eps, fingerprint, shards (None: every weight is whole here)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        folder: Path | None = None,
        shards: Shards | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name, self.folder, self.shards = tokenizer, name, folder, shards
        self.config: PretrainedConfig = model.config.get_text_config(decoder=True)
        self._values = self.config.to_dict()
        self.decoder, self.final_norm = find_decoder(model)
        self.layers: nn.ModuleList = self.decoder.get_submodule("layers")
        self.num_layers, self.hidden_size = len(self.layers), self.config.hidden_size
        self.vocab_size = self.config.vocab_size
        head = model.get_output_embeddings()
        self.embed_weight = self.decoder.get_submodule("embed_tokens").weight
        self.lm_head_weight, self.lm_head_bias = head.weight, head.bias
        self.dtype, self.device = self.embed_weight.dtype, self.embed_weight.device
        self.stop_ids = find_stop_ids(model, tokenizer)
        self.max_positions: int = self.config.max_position_embeddings
        self.head_dim: int = self._values.get("head_dim") or self.hidden_size // self.config.num_attention_heads
        self.rms_norm_eps: float = first_value(self._values, EPSILONS, "the epsilon of its norms")
        self.captured: dict[int, Any] = {}  # By batch size: StaticSteps, kept from one decoding to the next.
        with self.together():
            self.check_head()

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "model"):
        """A target from a model in memory, e.g. a tiny random one. The model is set to eval and frozen."""
        return cls(model, tokenizer, name)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex of what makes this target itself: its files, or config, tokenizer and weights when in memory."""
        if self.folder is not None:
            return fingerprint_folder(self.folder)
        digest = hashlib.sha256()
        values = {
            key: value for key, value in self._values.items() if key not in ("_name_or_path", "transformers_version")
        }
        add_part(digest, "config", json.dumps(values, sort_keys=True, default=str).encode())
        if self.tokenizer is not None:
            vocabulary = [sorted(self.tokenizer.get_vocab().items()), self.tokenizer.chat_template]
            add_part(digest, "tokenizer", json.dumps(vocabulary, sort_keys=True, default=str).encode())
        for name, parameter in self.model.named_parameters():
            sums = (parameter.double().sum().item(), parameter.double().square().sum().item())
            add_part(digest, name, repr((tuple(parameter.shape), *sums)).encode())
        return digest.hexdigest()

    @cached_property
    def spread(self) -> bool:
        """Whether the weights lie on several devices."""
        return len({parameter.device for parameter in self.model.parameters()}) > 1

    def together(self) -> AbstractContextManager[None]:
        """Where the layers are spread over processes (`shards`): what runs the target goes inside, in all of them."""
        return nullcontext() if self.shards is None else self.shards.together()

    @property
    def title(self) -> str:
        """The name for people: a hub id as it is, of a local path the last part."""
        path = Path(self.name).expanduser()
        return (path.stem if path.suffix == ".gguf" else path.name) if path.exists() else self.name

    def rope(self) -> dict:
        """{"rope_theta": float, "rope_scaling": dict | None} of the full-attention layers (the entry a draft takes)."""
        parameters = self._values.get("rope_parameters") or {}
        parameters = parameters.get("full_attention", parameters)
        if "rope_theta" not in parameters:
            raise TargetError(f"{self.name}: config.json gives no rope_theta. Expected a target with rotary positions.")
        scaling = {key: value for key, value in parameters.items() if key in ROPE_KEYS}
        plain = scaling.get("rope_type", "default") in UNSCALED_ROPES
        return {"rope_theta": parameters["rope_theta"], "rope_scaling": None if plain else scaling}

    @contextmanager
    def capture(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Within the block every forward of the model fills the yielded dict: k -> hs[k] [B, T, Ht], k in 0..n.

        hs[0] is the input of layer 0, hs[k] the output of layer k - 1. The hooks go at the end, whatever happens."""
        states: dict[int, Tensor] = {}

        def keep_input(module, args, kwargs):
            states[0] = args[0] if args else kwargs["hidden_states"]

        def keep_output(k):
            def hook(module, args, output):
                states[k] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = []
        try:
            for k in check_feature_layers(layers, self.num_layers):
                if k == 0:
                    handles.append(self.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
                else:
                    handles.append(self.layers[k - 1].register_forward_hook(keep_output(k)))
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor, lengths: Tensor | None, layers: Sequence[int]) -> dict[int, Tensor]:
        """k -> hs[k] [B, T, Ht] for each k in layers; hs[n] is un-normed. Only the backbone runs, without the head.

        input_ids [B, T] padded on the right, lengths [B] the real tokens of each row or None (all). A causal model
        needs no mask for that: padding lies in the future of every real token. Rows of padding come back as zeros."""
        with self.capture(layers) as states:
            self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
        if lengths is None:
            return states
        positions = torch.arange(input_ids.shape[1], device=self.device)
        padding = (positions[None, :] >= lengths.to(self.device)[:, None])[:, :, None]
        return {k: state.masked_fill(padding.to(state.device), 0) for k, state in states.items()}

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        cache: RaggedCache,
        lengths: Tensor | None = None,
        layers: Sequence[int] = (),
        last_only: bool = False,
        parents: Tensor | None = None,
    ) -> TargetStep:
        """Run tokens int64 [B, N] (right-padded, lengths [B] real ones) behind what `cache` holds of each row.

        Nothing is committed: raise cache.lengths by what is kept. last_only: logits of each row's last token alone.
        parents int64 [B, N-1]: the tokens behind column 0 are a tree (nn/tree.py); each sees its ancestors alone and
        sits at the position of its depth; call cache.gather with the accepted columns before raising the lengths."""
        lengths = torch.full((len(tokens),), tokens.shape[1]) if lengths is None else lengths
        depth = None if parents is None else F.pad(depths(parents), (1, 0))
        reach = lengths if depth is None else deepest(depth, lengths) + 1
        self.check_positions(int((cache.lengths + reach).max()))  # Padding of a long row may reach further.
        positions = cache.begin(tokens.shape[1])
        if depth is None:
            masks = self.masks(lambda **limits: visible(positions.to(self.device), cache.key_count, **limits))
        else:
            positions = cache.lengths[:, None] + depth
            committed, deep, family = (part.to(self.device) for part in (cache.lengths, depth, ancestors(parents)))
            masks = self.masks(lambda **limits: visible_tree(committed, family, cache.key_count, depth=deep, **limits))
        self.check_scaling(positions, lengths, int(cache.lengths.max()))
        last = (torch.arange(len(tokens)), lengths - 1) if last_only else None
        outputs = self.forward(tokens.to(self.device), positions.to(self.device), masks, cache, layers, last)
        return TargetStep(tokens, positions, lengths, *outputs)

    def check_positions(self, needed: int) -> None:
        """TargetError where the model has fewer positions than are needed."""
        if needed > self.max_positions:
            raise TargetError(
                f"{needed} positions are needed, {self.name} takes {self.max_positions}. "
                "Mend: shorten the prompts or lower max_new_tokens."
            )

    @property
    def scaled_from(self) -> int | None:
        """How many positions have one attention scale, where it grows with the position (Llama 4); None: everywhere."""
        return self._values["floor_scale"] if self._values.get("attn_temperature_tuning") else None

    def check_scaling(self, positions: Tensor, lengths: Tensor, longest: int) -> None:
        """TargetError where transformers would scale a row's attention otherwise than by its own positions: it counts
        them behind the longest row's `longest` entries, for all rows alike.
        """
        if self.scaled_from is None:
            return
        counted = longest + torch.arange(positions.shape[1])
        other = (positions + 1) // self.scaled_from != (counted + 1) // self.scaled_from
        if (other & (torch.arange(positions.shape[1]) < lengths[:, None])).any():
            raise TargetError(
                f"{self.name} scales its attention by position, in steps of {self.scaled_from}, and rows of this batch "
                "lie in different steps. Expected rows of one step. Mend: one request at a time (--concurrency 1, no "
                f"tree), or prompts and answers of less than {self.scaled_from} tokens together."
            )

    def forward(
        self, tokens: Tensor, positions: Tensor, masks, cache: RaggedCache, layers: Sequence[int], chosen=None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(logits, features, last_hidden) of a TargetStep from tensors on the device alone, behind an open cache.

        tokens, positions int64 [B, N]; masks: of `masks`; chosen: (rows [B], columns [B]) whose logits are wanted.
        """
        with self.capture(sorted({*layers, self.num_layers})) as states:
            normed = self.decoder(
                input_ids=tokens, position_ids=positions, attention_mask=masks, cache=cache, use_cache=True
            ).last_hidden_state
        logits = self._full_head.logits(normed if chosen is None else normed[chosen][:, None])
        features = torch.cat([states[k].to(self.device) for k in layers], -1) if layers else None
        return logits, features, states[self.num_layers]

    @cached_property
    def _full_head(self) -> TargetHead:
        return self.head()

    def masks(self, make: Callable[..., Tensor]) -> Tensor | dict[str, Tensor]:
        """Prepared 4-D masks in the form the model takes: one for each layer type, or a single one; make: the bool mask
        of full attention, or of `window=` or `chunk=` so many positions."""
        window = self._values.get("sliding_window")
        kinds = set(
            self._values.get("layer_types") or (["full_attention"] if window is None else ["sliding_attention"])
        )
        unknown = kinds - set(ATTENTION)
        if unknown:
            raise TargetError(
                f"{self.name} has layers of type {', '.join(sorted(unknown))}. Decoding here expects {KNOWN}. "
                "Mend: evaluate this target in a serving engine."
            )
        limits = {
            "full_attention": {},
            "sliding_attention": {"window": window},
            "chunked_attention": {"chunk": self._values.get("attention_chunk_size")},
        }
        masks = {}
        for kind in kinds:
            mask = make(**limits[kind])
            masks[kind] = mask if self.config._attn_implementation == "sdpa" else additive(mask, self.dtype)
        return masks if len(masks) > 1 else masks.popitem()[1]

    def head(self, rows: Tensor | None = None) -> TargetHead:
        """The head over the given vocabulary rows [R] (int64, a copy of them), or over all of them without a copy."""
        weight, bias = self.lm_head_weight.detach(), self.lm_head_bias
        if rows is not None:
            weight = weight[rows.to(weight.device)]
            bias = None if bias is None else bias[rows.to(bias.device)]
        return TargetHead(self.final_norm, weight, bias, *logit_shape(self._values))

    @torch.no_grad()
    def check_head(self) -> None:
        """TargetError unless head(hs[n]) gives the model's own logits: no unknown scale or cap goes unnoticed."""
        tokens = torch.arange(2, 6, device=self.device)[None] % self.vocab_size
        with self.capture([self.num_layers]) as states:
            expected = self.model(input_ids=tokens, use_cache=False).logits.float()
        error = (self.head()(states[self.num_layers]).float() - expected).abs().max()
        if not error <= 0.02 * expected.abs().max():
            raise TargetError(
                f"{self.name}: norm and head of {type(self.model).__name__} do not reproduce its logits (off by "
                f"{error:.3g} of {expected.abs().max():.3g}). Expected finite softcap(scale * head(norm(hs[n]))). "
                "Mend: choose another target, or another dtype if its numbers overflow."
            )


def find_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The backbone that holds embed_tokens, layers and the final norm, and that norm; vision towers are passed over."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        children = dict(module.named_children())
        layers = children.get("layers")
        norms = [name for name in FINAL_NORMS if name in children]
        if isinstance(layers, nn.ModuleList) and len(layers) == count and norms and "embed_tokens" in children:
            return module, children[norms[0]]
    raise TargetError(
        f"{type(model).__name__} has no decoder stack that this package knows. Expected a module with embed_tokens, "
        f"{count} layers and one of {', '.join(FINAL_NORMS)}. Mend: choose a target such as Llama, Qwen or Gemma."
    )


def find_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Ids that end the target's turn, ascending: the generation config's, the tokenizer's eos, end-of-turn specials.

    <|end|> counts only without <|return|>: in gpt-oss it closes a message inside the turn."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    stops = set(configured if isinstance(configured, list) else [configured])
    if tokenizer is not None:
        stops.add(tokenizer.eos_token_id)
        specials = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        ends = [name for name in END_OF_TURN if name in specials]
        stops |= {specials[name] for name in ends if name != "<|end|>" or "<|return|>" not in specials}
    return tuple(sorted(stop for stop in stops if stop is not None))


def load_target(
    name_or_path: str,
    *,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    shard: bool = False,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """A frozen Target from a folder, a hub id, a .gguf file, or a folder and the name of a GGUF file in it.

    dtype auto: as stored, float16 on a CPU as bfloat16. device_map ("auto", "balanced", ..) spreads the layers over
    devices and overrides device; shard: over the processes of this launch on this machine (target_shards.py), if there
    are several. TargetError, within seconds, for whatever is missing, unknown or not a decoder."""
    chosen = choose_device(device)
    folder = find_folder(name_or_path, gguf_file, revision, trust_remote_code)
    config = read_config(str(folder), trust_remote_code)
    check_supported(config, name_or_path)
    tokenizer = read_tokenizer(str(folder), trust_remote_code)
    options = {"device_map": device_map, "attn_implementation": attn_implementation}
    options = {key: value for key, value in options.items() if value is not None}
    options |= {"dtype": choose_dtype(dtype, config, folder, chosen), "trust_remote_code": trust_remote_code}
    if shard and processes_here() > 1:
        check_plain(config)
        model, shards = _spread(lambda: read_model(str(folder), config, options), chosen)
        return Target(model, tokenizer, name_or_path, folder, shards)
    model = read_model(str(folder), config, options)
    return Target(model if device_map else model.to(chosen), tokenizer, name_or_path, folder)


def _spread(read: Callable[[], PreTrainedModel], device: torch.device) -> tuple[PreTrainedModel, Shards]:
    """A model of which this process keeps its part of each layer; read by one process after the other, so that a
    machine's memory holds one whole model at a time.
    """
    mesh = mesh_here(device)

    def part() -> tuple[PreTrainedModel, Shards]:
        model = read()
        decoder, _ = find_decoder(model)
        shards = Shards(decoder, decoder.get_submodule("layers"), mesh)
        return model.to(device), shards

    return in_turns(part, mesh)


def check_plain(config: PretrainedConfig) -> None:
    """TargetError for quantised weights, which cannot be spread over processes."""
    if "quantization_config" in config.to_dict():
        raise TargetError(
            "target.shard spreads plain weights, and this target's are quantised. Expected bf16, fp16 or fp32. Mend: "
            "features.source vllm, or target.device_map."
        )
