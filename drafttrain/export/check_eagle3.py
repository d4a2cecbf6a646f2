"""EAGLE-3 drafts as engines load them: names, shapes, the vocabulary map, layer ids, flags and what is the target's."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafts.eagle3_files import rope_of
from drafttrain.drafts.eagle3_start import is_table
from drafttrain.export import check_shared as shared
from drafttrain.export.check_files import Finding, StoredDraft, StoredView, TargetFacts
from drafttrain.export.check_shared import AGAIN, some

ARCHITECTURES = {
    "vllm": ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "PEagleDraftModel")
    + ("Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM")
    + ("Eagle3Qwen3vlForCausalLM",),
    "sglang": ("LlamaForCausalLMEagle3",),
    "tensorrt-llm": ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    "llama.cpp": ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel"),
}
"""Names in `architectures` under which each engine builds the Llama-shaped draft. vLLM, told "eagle3", puts Eagle3
before a plain name; TensorRT-LLM builds the class that its own settings name.
"""
NESTED, TOP = "eagle_config", "eagle_aux_hidden_state_layer_ids"
TARGETS_OWN = ("verifier_",)
OUTSIDE = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""What vLLM takes of speculators' top-level settings, with the layer ids; all else is nested."""


class Eagle3View(StoredView):
    """A stored draft with its settings flat: values as vLLM flattens speculators' nested ones, nothing filled in."""

    @property
    def raw(self) -> dict[str, Any]:
        return self.draft.config

    @property
    def speculators(self) -> bool:
        return "speculators_model_type" in self.raw or "speculators_config" in self.raw

    @cached_property
    def values(self) -> dict[str, Any]:
        inner = self.raw.get("transformer_layer_config") or {}
        outside = {key: self.raw[key] for key in (*OUTSIDE, TOP) if key in self.raw}
        return {**inner, **outside} if self.speculators else self.raw

    @property
    def nested(self) -> dict[str, Any]:
        return self.values.get(NESTED) or {}

    @cached_property
    def names(self) -> dict[str, str]:
        out = {}
        for stored in self.draft.headers:
            name = stored.removeprefix("model.") if self.prefixed else stored
            name = "midlayer." + name[len("layers.0.") :] if name.startswith("layers.0.") else name
            if not name.startswith(TARGETS_OWN) and not name.endswith("rotary_emb.inv_freq"):
                out[name] = stored
        return out

    @property
    def prefixed(self) -> bool:
        return any(name.startswith(("model.midlayer.", "model.layers.0.", "model.fc.")) for name in self.draft.headers)

    @property
    def layout(self) -> str:
        """Who wrote it: drafttrain, speculators, SpecForge or SafeAILab, as far as one can tell."""
        if self.speculators:
            return "speculators"
        if self.draft.facts:
            return "drafttrain"
        return "SafeAILab" if self.raw.get("architectures") == ["LlamaForCausalLM"] else "SpecForge"

    @property
    def hidden(self) -> int:
        return self.values.get("hidden_size") or 0

    @property
    def target_hidden(self) -> int:
        return self.values.get("target_hidden_size") or self.hidden

    @property
    def vocab(self) -> int:
        return self.values.get("vocab_size") or 0

    @property
    def draft_vocab(self) -> int:
        return self.values.get("draft_vocab_size") or self.vocab

    @property
    def aux(self) -> int:
        """How many features fc has columns for."""
        shape = self.shape("fc.weight")
        return shape[1] // self.target_hidden if shape and len(shape) == 2 and self.target_hidden else 3

    @property
    def built_as(self) -> str:
        """The architecture that vLLM builds."""
        if self.speculators:
            kind = self.values.get("model_type", "llama")
            return {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}.get(kind, kind)
        return (self.raw.get("architectures") or [""])[0]

    @property
    def qk_norms(self) -> bool:
        return any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in self.names)


def check(draft: StoredDraft, target: TargetFacts) -> Iterator[Finding]:
    """All findings of an EAGLE-3 draft; the table says which engines each concerns."""
    view = Eagle3View(draft, target)
    yield from _features(view)
    yield from _tensors(view)
    yield from _vocabulary(view)
    yield from layer_ids(view)
    yield from _flags(view)
    yield from _architectures(view)
    yield from _targets_own(view)
    yield from shared.numbers(draft, zero_is_fine=(".bias",))
    yield from shared.dtypes(draft, view.values, apart=("d2t", "t2d"))
    yield from shared.quantization(draft, view.values)
    yield from shared.tied(view.values)
    yield from shared.tokenizer(draft, target)


def _features(view: Eagle3View) -> Iterator[Finding]:
    """What a sound draft may have and not every engine serves."""
    values, names = view.values, view.names
    other = "serve it with an engine that has this, or train without"
    for flag in ("norm_before_residual", "fc_norm", "norm_output", "attention_bias", "mlp_bias"):
        if values.get(flag):
            yield Finding(flag, f"{flag} true", other)
    if view.nested.get("norm_before_fc", values.get("norm_before_fc")):
        yield Finding("norm_before_fc", "norm_before_fc true", other)
    if "fc.bias" in names:
        yield Finding("fc_bias", "fc.bias", other)
    if view.qk_norms:
        qwen3 = view.built_as.startswith(("Qwen3", "Eagle3Qwen3F"))
        others = ("sglang", "tensorrt-llm", "llama.cpp")
        yield Finding("qk_norm", "norms of queries and keys (q_norm, k_norm)", other, others if qwen3 else None)
    if (values.get("num_hidden_layers") or 1) > 1:
        yield Finding("several_layers", f"{values['num_hidden_layers']} layers", other)
    if "sliding_attention" in (values.get("layer_types") or []):
        yield Finding("sliding_window", f"sliding_window {values.get('sliding_window')}", other)
    if "embed_tokens.weight" in names and view.hidden == view.target.hidden_size:
        table = view.target.table("embed_tokens.weight")
        if table is None or not is_table(view.tensor("embed_tokens.weight"), table):
            known = "not the target's" if table is not None else "the target's or not: its weights are not here"
            yield Finding("own_embeddings", f"embed_tokens.weight, {known}", other)
    if view.aux != 3:
        yield Finding("aux_count", f"{view.aux} features", other)
    if view.speculators:
        yield Finding("speculators_layout", "speculators' layout", "drafttrain convert DIR --to ours")


def expected_shapes(view: Eagle3View) -> dict[str, tuple[int, ...]]:
    """The tensors that the settings ask for, under the engines' names."""
    values, H, Ht, A = view.values, view.hidden, view.target_hidden, view.aux
    heads = values.get("num_attention_heads") or 1
    kv_heads, head_dim = values.get("num_key_value_heads") or heads, values.get("head_dim") or H // heads
    inner = values.get("intermediate_size") or 0
    out: dict[str, tuple[int, ...]] = {"fc.weight": (H, A * Ht), "norm.weight": (H,)}
    out["lm_head.weight"] = (view.draft_vocab, H)
    for i in range(values.get("num_hidden_layers") or 1):
        layer, width = (f"layers.{i}", H) if i else ("midlayer", 2 * H)
        out |= {f"{layer}.{name}.weight": (H,) for name in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{layer}.mlp.{name}_proj.weight": (inner, H) for name in ("gate", "up")}
        out[f"{layer}.mlp.down_proj.weight"] = (H, inner)
        rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        out |= {f"{layer}.self_attn.{name}_proj.weight": (count, width) for name, count in rows.items()}
        out[f"{layer}.self_attn.o_proj.weight"] = (H, heads * head_dim)
        if not i:
            out["midlayer.hidden_norm.weight"] = (H,)
        if values.get("attention_bias"):
            out |= {f"{layer}.self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
        if values.get("mlp_bias"):
            out |= {f"{layer}.mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
            out[f"{layer}.mlp.down_proj.bias"] = (H,)
        if view.qk_norms:
            out |= {f"{layer}.self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    if values.get("fc_norm"):
        out |= {f"fc_norm.{i}.weight": (Ht,) for i in range(A)}
    if view.nested.get("norm_before_fc", values.get("norm_before_fc")):
        out["input_norm.weight"] = (A * Ht,)
    return out


def _tensors(view: Eagle3View) -> Iterator[Finding]:
    expected, names = expected_shapes(view), view.names
    if view.prefixed:
        yield Finding("name-prefix", "names that start with model.", f"rename them without it, or {AGAIN}")
    missing = sorted(expected.keys() - names.keys())
    if "lm_head.weight" in missing:
        missing.remove("lm_head.weight")
        yield Finding("missing-head", "no lm_head.weight", AGAIN)
    if missing:
        yield Finding("missing-tensor", f"no {some(missing)}", AGAIN)
    if view.hidden != view.target_hidden and "embed_tokens.weight" not in names:
        found = f"hidden_size {view.hidden}, the target's {view.target_hidden}, and no embed_tokens.weight"
        yield Finding("missing-embeddings", found, AGAIN)
    if "feature_rms" in names:
        found = "feature_rms: masters, whose scales are not folded into fc"
        yield Finding("feature-scales", found, "drafttrain export")
    known = {*expected, "embed_tokens.weight", "d2t", "t2d", "feature_rms", "fc.bias"}
    known |= {f"layers.{i}.hidden_norm.weight" for i in range(1, view.values.get("num_hidden_layers") or 1)}
    unused = [n for n in names if n.startswith(("input_norm.", "fc_norm.")) and n not in known]
    if unused:
        yield Finding("unused-tensor", f"{some(unused)}, and its flag is not set", "set norm_before_fc or fc_norm")
    unknown = sorted(n for n in names if n not in known and n not in unused and not n.endswith("_proj.bias"))
    if unknown:
        yield Finding("unknown-tensor", some(unknown), AGAIN)
    said = view.values.get("attention_bias")
    biases = [n for n in names if n.endswith("_proj.bias") and n not in known and not (said and "o_proj" in n)]
    if biases:
        flag = "mlp_bias" if ".mlp." in biases[0] else "attention_bias"
        yield Finding("unused-tensor", f"{some(biases)}, and {flag} is not set", f"write {flag}: true")
    expected["embed_tokens.weight"] = (view.vocab, view.hidden)
    wrong = [f"{n} {view.shape(n)}, not {want}" for n, want in expected.items() if n in names and view.shape(n) != want]
    if wrong:
        yield Finding("shape", some(wrong), f"correct the sizes in config.json, or {AGAIN}")


def _vocabulary(view: Eagle3View) -> Iterator[Finding]:
    V, values = view.target.vocab_size, view.values
    if view.vocab != V:
        yield Finding("vocab-size", f"vocab_size {values.get('vocab_size')}, the target's config has {V}", f"write {V}")
    head = view.shape("lm_head.weight")
    if values.get("draft_vocab_size") is None and head and head[0] != view.vocab:
        found = f"no draft_vocab_size, and a head of {head[0]} rows"
        yield Finding("draft-vocab-size", found, f"write draft_vocab_size: {head[0]}")
    count = head[0] if head else view.draft_vocab
    if "d2t" not in view.names:
        if count < V:
            found = f"{count} of {V} words and no d2t"
            yield Finding("missing-d2t", found, f"{AGAIN}; from elsewhere: take the map from its first release")
    elif view.draft_vocab == V:
        yield Finding("unexpected-d2t", "a d2t over the whole vocabulary", "delete d2t from the file")
    elif view.shape("d2t") != (count,):
        yield Finding("d2t-shape", f"d2t {view.shape('d2t')} for a head of {count} rows", AGAIN)
    else:
        yield from _map(view.tensor("d2t"), view.tensor("t2d") if "t2d" in view.names else None, V)


def _map(d2t: Tensor, t2d: Tensor | None, vocab: int) -> Iterator[Finding]:
    """d2t [Vd] holds offsets: draft word i is the target's i + d2t[i]; t2d bool [V] is true at exactly these."""
    if d2t.is_floating_point():
        yield Finding("d2t-dtype", f"d2t in {d2t.dtype}", "store int64 offsets")
    stored = d2t.long()
    ids = stored + torch.arange(len(stored))
    named = None if t2d is None else t2d.reshape(-1).bool().nonzero()[:, 0]
    if _is_map(stored, vocab) and (_same(stored, named) or (not _is_map(ids, vocab) and bool(stored.any()))):
        found = f"d2t holds target ids ({stored[:3].tolist()} .. {int(stored[-1])}), not offsets"
        yield Finding("d2t-absolute-ids", found, "subtract the row's number from each entry")
        return
    mend = f"{AGAIN}; from elsewhere: take the map from its first release"
    yield from shared.word_ids(ids, vocab, "d2t", "target ids", mend)
    if not bool(stored.any()) and len(ids) < vocab and not _same(ids, named):
        yield Finding("d2t-zero", f"only zeros in d2t: the first {len(ids)} ids", mend)
    elif named is not None and not _same(ids.sort().values, named):
        yield Finding("t2d-disagrees", f"d2t and t2d name other words ({len(ids)} and {len(named)})", mend)


def _is_map(ids: Tensor, vocab: int) -> bool:
    return int(ids[0]) >= 0 and int(ids[-1]) < vocab and bool((ids.diff() > 0).all())


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)


def layer_ids(view: Eagle3View) -> Iterator[Finding]:
    """Both lists of layer ids: hs[k] above, k - 1 in eagle_config."""
    n, values = view.target.num_layers, view.values
    top, nested = values.get(TOP), view.nested.get(TOP)
    defaults = [2, n // 2, n - 3]
    ids = top if top is not None else [k + 1 for k in nested] if nested else None
    both = f"{TOP}: {ids or defaults}, and in {NESTED} {[k - 1 for k in ids or defaults]}"
    if not ids:
        if view.layout != "SafeAILab" or n < 7:
            mend = f"write the layers it was trained on; with its trainer's defaults {both}"
            yield Finding("layer-ids-missing", "no layer ids", mend)
        return
    if top is None:
        yield Finding(
            "layer-ids-nested-only", f"{NESTED} names {nested}, and there is no top-level list", f"write {both}"
        )
    elif not nested and not view.speculators and top != defaults:
        found = f"{top} at the top level, nothing in {NESTED}; the defaults are {defaults}"
        yield Finding("layer-ids-top-only", found, f"write {both}")
    elif nested and [k + 1 for k in nested] != top:
        found = f"{top} at the top level and {nested} in {NESTED}, which means hs{[k + 1 for k in nested]}"
        yield Finding("layer-ids-disagree", found, f"write the layers it was trained on, e.g. {both}")
    if len(set(ids)) < len(ids):
        yield Finding("layer-ids-duplicate", f"layer ids {ids}", "train on distinct layers")
    elif sorted(ids) != list(ids):
        yield Finding("layer-ids-unsorted", f"layer ids {ids}", "sort them, and fc's columns with them")
    if min(ids) < 0 or max(ids) > n:
        yield Finding("layer-ids-range", f"layer ids {ids}, the target has {n} layers", "give the target it belongs to")
    wide = view.shape("fc.weight")
    if wide and len(wide) == 2 and len(ids) * view.target_hidden != wide[1]:
        found = f"{len(ids)} layer ids, fc of {wide[1]} columns, features of {view.target_hidden}"
        yield Finding("shape", found, f"write the layers it was trained on, or {AGAIN}")
    built = values.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    if built != len(ids):
        found = f"{len(ids)} layer ids, and engines build fc for {built}"
        yield Finding("num-aux", found, f"write num_aux_hidden_states: {len(ids)}")


def _flags(view: Eagle3View) -> Iterator[Finding]:
    values, nested = view.values, view.nested
    if nested.get("use_aux_hidden_state") is False:
        yield Finding("aux-off", "use_aux_hidden_state false", "write true")
    flag = bool(values.get("norm_before_fc"))
    if flag != bool(nested.get("norm_before_fc")) and not view.speculators:
        found = f"norm_before_fc {values.get('norm_before_fc')}, in {NESTED} {nested.get('norm_before_fc')}"
        engines = None if "norm_before_fc" in nested else ("tensorrt-llm",)
        yield Finding("norm-before-fc-nested", found, "write the same in both places", engines)
    if view.speculators and "norm_before_residual" not in view.raw:
        mend = "write norm_before_residual as it was trained"
        yield Finding("norm-before-residual-unsaid", "no norm_before_residual", mend)
    if values.get("hidden_act", "silu") != "silu":
        yield Finding("hidden-act", f"hidden_act {values['hidden_act']}", "train with silu")


def _architectures(view: Eagle3View) -> Iterator[Finding]:
    """The name under which each engine builds the draft, and the config class."""
    named = (view.raw.get("architectures") or [""])[0]
    wrong = [e for e, known in ARCHITECTURES.items() if (view.built_as if e == "vllm" else named) not in known]
    if view.speculators:
        wrong = [engine for engine in wrong if engine not in ("sglang", "tensorrt-llm")]
    if wrong:
        found = f"architectures {view.raw.get('architectures')}"
        yield Finding("architectures", found, 'write ["LlamaForCausalLMEagle3"]', tuple(wrong))
    if not view.values.get("model_type") and not view.speculators:
        yield Finding("model-type", "no model_type", 'write model_type: "llama"')


def _targets_own(view: Eagle3View) -> Iterator[Finding]:
    """RoPE, eps, positions and width: the target's."""
    values, target = view.values, view.target
    if view.target_hidden != target.hidden_size:
        found = f"{'target_hidden_size' if values.get('target_hidden_size') else 'hidden_size'} {view.target_hidden}"
        mend = f"write target_hidden_size: {target.hidden_size}, or give the target it was trained for"
        yield Finding("target-hidden-size", f"{found}, the target has {target.hidden_size}", mend)
    theta, scaling = rope_of(values)
    said = "no rope_theta, which means 10000" if theta is None else f"rope_theta {theta}"
    if target.rope_theta is not None and (theta or 10000.0) != target.rope_theta:
        mend = f"write {target.rope_theta} if it was trained with that; otherwise train again"
        yield Finding("rope-theta", f"{said}, the target has {target.rope_theta}", mend)
    if scaling != target.rope_scaling:
        mend = "write the target's if it was trained with that; otherwise train again"
        yield Finding("rope-scaling", f"rope_scaling {scaling}, the target has {target.rope_scaling}", mend)
    eps = values.get("rms_norm_eps") or 1e-6
    if abs(eps - target.eps) > 1e-3 * target.eps:
        yield Finding("eps", f"rms_norm_eps {eps}, the target has {target.eps}", f"write {target.eps}")
    yield from shared.positions(values, target)
