"""Small drafts as engines load them: an ordinary causal language model of the target's padded vocabulary."""

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafttrain.drafts.base import DraftError, read_facts
from drafttrain.export import check_shared as shared
from drafttrain.export.base import ExportError
from drafttrain.export.check_files import Finding, StoredDraft, TargetFacts
from drafttrain.export.check_shared import AGAIN, some
from drafttrain.export.serve import check_layers
from drafttrain.target_files import TargetError, read_config

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NEAR = 128
"""llama.cpp takes vocabulary sizes that are no further apart."""
GENERATION = {
    "num_assistant_tokens": None,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0,
}


def check(draft: StoredDraft, target: TargetFacts) -> Iterator[Finding]:
    """All findings of a small draft; the table says which engines each concerns."""
    yield from _tensors(draft)
    yield from _vocabulary(draft, target)
    yield from _settings(draft)
    # Gemma's norms are stored around zero.
    yield from shared.numbers(draft, zero_is_fine=(".bias", "norm.weight", "_layernorm.weight"))
    yield from shared.dtypes(draft, draft.config, apart=tuple(n for n in draft.headers if n.endswith("e_score_bias")))
    yield from shared.quantization(draft, draft.config)
    yield from shared.positions(draft.config, target)
    yield from shared.tokenizer(draft, target)


def _expected(draft: StoredDraft) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes that the config's own class has, built without memory; None where that cannot be told: models of
    experts store theirs under other names than they hold them.
    """
    config = _config(draft)
    if draft.config.get("quantization_config") is not None:
        vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return None if any("experts" in name for name in found) else found


def _tensors(draft: StoredDraft) -> Iterator[Finding]:
    names, config = draft.headers, draft.config
    named, kind = config.get("architectures") or [], config.get("model_type")
    if named != [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)]:
        mend = f"write [{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)!r}]"
        yield Finding("architectures", f"architectures {named} for model_type {kind}", mend)
        return
    tied = bool(_config(draft).get_text_config(decoder=True).to_dict().get("tie_word_embeddings"))
    if HEAD not in names and not tied:
        yield Finding("missing-head", f"no {HEAD}, and tie_word_embeddings is not set", AGAIN)
    elif HEAD in names and tied and EMBED in names and not torch.equal(draft.tensor(HEAD), draft.tensor(EMBED)):
        found = "tie_word_embeddings true, and a head that is not the embedding table"
        yield Finding("tied-head-differs", found, "write tie_word_embeddings: false")
    expected = _expected(draft)
    if expected is None:
        return
    missing = sorted(expected.keys() - names.keys() - {HEAD})
    if missing:
        yield Finding("missing-tensor", f"no {some(missing)}", AGAIN)
    unknown = sorted(n for n in names.keys() - expected.keys() - {HEAD} if not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        yield Finding("unknown-tensor", some(unknown), AGAIN)
    wrong = [
        f"{n} {names[n].shape}, not {want}" for n, want in expected.items() if n in names and names[n].shape != want
    ]
    rows = [text for text in wrong if text.startswith((EMBED, HEAD))]
    if rows:
        yield Finding("embedding-rows", some(rows), f"write the rows' number as vocab_size, or {AGAIN}")
    if len(wrong) > len(rows):
        yield Finding("shape", some([text for text in wrong if text not in rows]), "correct the sizes in config.json")


def _config(draft: StoredDraft) -> PretrainedConfig:
    """The config's own class, which fills in what is left out."""
    try:
        return read_config(str(draft.folder), False)
    except TargetError as error:
        raise DraftError(str(error)) from error


def _vocabulary(draft: StoredDraft, target: TargetFacts) -> Iterator[Finding]:
    found, V = draft.config.get("vocab_size"), target.vocab_size
    if found != V:
        far = not isinstance(found, int) or abs(found - V) > NEAR
        engines = None if far else ("vllm", "sglang", "transformers")
        mend = "pad or cut embedding and head: drafttrain export writes the target's size"
        yield Finding("vocab-size", f"vocab_size {found}, the target's config has {V}", mend, engines)


def _settings(draft: StoredDraft) -> Iterator[Finding]:
    path = draft.folder / "generation_config.json"
    values = read_facts(path) if path.exists() else {}
    wrong = [
        f"{name} {values.get(name)}"
        for name, want in GENERATION.items()
        if values.get(name) is None or (want is not None and values[name] != want)
    ]
    if wrong:
        found = ", ".join(wrong) + ("" if path.exists() else " (no generation_config.json)")
        mend = 'write num_assistant_tokens: k, num_assistant_tokens_schedule: "constant" and '
        yield Finding("generation-config", found, mend + "assistant_confidence_threshold: 0.0")
    try:
        check_layers("llama.cpp", draft.config, "the draft")
    except ExportError as error:
        yield Finding("layer-pattern", str(error).partition(". llama.cpp")[0], "serve it with another engine")
