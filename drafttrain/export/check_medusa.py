"""Medusa heads as engines load them: in vLLM's form, and in that of their first release (medusa_lm_head)."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafts.medusa import MAP, SHARED
from drafttrain.drafts.medusa_config import ARCHITECTURE, SEQUENTIAL
from drafttrain.export import check_shared as shared
from drafttrain.export.check_files import Finding, StoredDraft, StoredView, TargetFacts
from drafttrain.export.check_shared import AGAIN, some

ORIGINAL_BLOCK = re.compile(r"^(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
ORIGINAL_HEAD = re.compile(r"^(?:medusa_heads\.)?(\d+)\.(\d+)\.weight$")
BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")


SAMPLE = 256
"""Rows that are compared with the target's."""


class MedusaView(StoredView):
    """Stored heads under vLLM's names, as it renames those of the first release."""

    @property
    def values(self) -> dict[str, Any]:
        return self.draft.config

    @cached_property
    def names(self) -> dict[str, str]:
        out = {}
        for stored in self.draft.headers:
            name = stored.removeprefix("medusa_heads.")
            block, head = ORIGINAL_BLOCK.match(stored), ORIGINAL_HEAD.match(stored)
            if block:
                name = f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
            elif head:
                name = f"lm_heads.{head[1]}.weight"
            out[name] = stored
        return out

    @property
    def original(self) -> bool:
        return any(ORIGINAL_BLOCK.match(name) for name in self.draft.headers)

    @property
    def layout(self) -> str:
        return "original (medusa_lm_head)" if self.original else "vLLM"

    def counted(self, what: str, default: int) -> int:
        """How many heads or layers vLLM reads from the config: the last key with num and that word."""
        keys = [key for key in self.values if "num" in key and what in key and (what == "heads" or "heads" not in key)]
        return self.values[keys[-1]] if keys else default

    @property
    def num_heads(self) -> int:
        return self.counted("heads", 5)

    @property
    def num_layers(self) -> int:
        return self.counted("layers", 1)

    @property
    def stored_heads(self) -> int:
        found = [BLOCK.match(name) for name in self.names]
        return len({match[1] for match in found if match})

    @property
    def shared(self) -> bool:
        return bool(self.values.get("original_lm_head"))

    @property
    def words(self) -> int:
        """How many words are drafted."""
        return self.values.get("truncated_vocab_size") or self.values.get("vocab_size") or self.target.vocab_size


def check(draft: StoredDraft, target: TargetFacts) -> Iterator[Finding]:
    """All findings of Medusa heads; the table says which engines each concerns."""
    view = MedusaView(draft, target)
    yield from _form(view)
    yield from _tensors(view)
    yield from _shapes(view)
    yield from _vocabulary(view)
    yield from shared.numbers(draft, zero_is_fine=(".bias",))
    yield from shared.dtypes(draft, view.values, apart=("input_rms",))
    yield from shared.quantization(draft, view.values)
    yield from shared.tied(view.values)
    yield from shared.tokenizer(draft, target)


def _form(view: MedusaView) -> Iterator[Finding]:
    values = view.values
    named = (values.get("architectures") or [ARCHITECTURE])[0]
    if values.get("sequential") or named == SEQUENTIAL:
        yield Finding("sequential", "heads that read drafted tokens", "train with draft.sequential: false")
    elif named != ARCHITECTURE and not view.original:
        yield Finding("architectures", f"architectures {[named]}", f'write ["{ARCHITECTURE}"]')
    if not view.original:
        yield Finding("engine_layout", "vLLM's layout", "drafttrain export --engine tensorrt-llm")
    for what in ("heads", "layers"):
        keys = [key for key in values if "num" in key and what in key]
        if len(keys) > 1:
            mend = f"delete all but {'num_heads' if what == 'heads' else 'num_hidden_layers'}"
            yield Finding("head-count-keys", ", ".join(f"{key} {values[key]}" for key in keys), mend)


def _tensors(view: MedusaView) -> Iterator[Finding]:
    names, heads = view.names, view.num_heads
    blocks = [f"blocks.{i}.layers.{j}" for i in range(min(heads, view.stored_heads)) for j in range(view.num_layers)]
    if heads > view.stored_heads:
        found = f"{heads} heads in the config, {view.stored_heads} in the file"
        yield Finding("num-heads", found, f"write num_heads: {view.stored_heads}")
    elif heads < view.stored_heads:
        found = f"{heads} heads in the config, {view.stored_heads} in the file"
        yield Finding("heads-unused", found, f"write num_heads: {view.stored_heads}, or export with --k {heads}")
    biases = [name for name in names if BLOCK.match(name) and name.endswith(".bias")]
    if biases and not view.values.get("medusa_fc_bias"):
        found = f"{len(biases)} biases, medusa_fc_bias {view.values.get('medusa_fc_bias')}"
        yield Finding("medusa-fc-bias", found, "write medusa_fc_bias: true")
    missing = [f"{b}.bias" for b in blocks if f"{b}.bias" not in names]
    if missing and view.values.get("medusa_fc_bias"):
        yield Finding("missing-bias", f"no {some(missing)}", AGAIN)
    missing = [f"{b}.weight" for b in blocks if f"{b}.weight" not in names]
    if missing:
        yield Finding("missing-tensor", f"no {some(missing)}", AGAIN)
    own = [f"lm_heads.{i}.weight" for i in range(heads)]
    wanted = [SHARED] if view.shared and not view.original else own
    absent = [name for name in wanted if name not in names]
    if absent and not (view.shared and own[0] in names):
        yield Finding("missing-head", f"no {some(absent)}", AGAIN)
    if "input_rms" in names:
        yield Finding("input-scales", "input_rms: masters, whose scales are not folded in", "drafttrain export")
    known = {*wanted, *own, MAP, "input_rms", "draft_ids", *(n for n in names if BLOCK.match(n))}
    unknown = sorted(names.keys() - known)
    if unknown:
        yield Finding("unknown-tensor", some(unknown), AGAIN)


def _shapes(view: MedusaView) -> Iterator[Finding]:
    H = view.values.get("hidden_size") or view.target.hidden_size
    if view.target.hidden_size != H:
        found = f"hidden_size {H}, the target has {view.target.hidden_size}"
        yield Finding("hidden-size", found, "give the target they were trained for")
    wrong = []
    for name in view.names:
        shape, block = view.shape(name), BLOCK.match(name)
        if block:
            want = (H, H) if name.endswith("weight") else (H,)
        elif name == SHARED or name.startswith("lm_heads."):
            # vLLM picks the map's rows where a head has more.
            want = (view.target.vocab_size if view.original else view.words, H)
            if MAP in view.names and shape == (view.target.vocab_size, H):
                continue
        else:
            continue
        if shape != want:
            wrong.append(f"{name} {shape}, not {want}")
    if wrong:
        yield Finding("shape", some(wrong), f"correct the sizes in config.json, or {AGAIN}")


def _vocabulary(view: MedusaView) -> Iterator[Finding]:
    values, V = view.values, view.target.vocab_size
    said = values.get("vocab_size")
    if said is not None and said != V:
        yield Finding("vocab-size", f"vocab_size {said}, the target's config has {V}", f"write {V}")
    reduced = view.words < (said or V)
    if MAP not in view.names:
        if reduced:
            yield Finding("token-map-missing", f"{view.words} words and no {MAP}", AGAIN)
        return
    if not reduced:
        found = f"{MAP}, and truncated_vocab_size {values.get('truncated_vocab_size')}"
        yield Finding("token-map-unused", found, f"write truncated_vocab_size: {view.shape(MAP)[0]}")
    elif not view.shared:
        yield Finding("token-map-own-heads", f"{MAP} and no original_lm_head", "train with the shared head")
    if view.shape(MAP) != (view.words,) and reduced:
        yield Finding("token-map-shape", f"{MAP} {view.shape(MAP)} for {view.words} words", AGAIN)
    ids = view.tensor(MAP).reshape(-1).long()
    problems = list(_map(ids, V))
    yield from problems
    if not problems and view.shared and view.shape(SHARED) == (len(ids), view.target.hidden_size):
        yield from _based(ids, view.tensor(SHARED), view.target.head())


def _based(ids: Tensor, rows: Tensor, head: Tensor | None) -> Iterator[Finding]:
    """A shared matrix holds the target's own rows at the map's ids; here, where the target's weights are at hand, those
    beside them.
    """
    sample = slice(0, SAMPLE)
    for shift in (0, 1, -1):
        there = ids[sample] + shift
        if head is None or int(there.min()) < 0 or int(there.max()) >= len(head):
            continue
        if torch.allclose(head[there].float(), rows[sample].float(), atol=1e-2, rtol=1e-2):
            if shift:
                yield Finding("token-map-shifted", f"the rows are those of ids {shift:+d}", f"add {shift} to {MAP}")
            return


def _map(ids: Tensor, vocab: int) -> Iterator[Finding]:
    """token_map [k] holds target ids, rising."""
    summed = ids + torch.arange(len(ids))
    rising = bool((ids.diff() > 0).all())
    if not rising and bool((ids.diff() >= 0).all()) and int(ids[0]) >= 0 and int(summed[-1]) < vocab:
        found = f"{MAP} holds offsets ({ids[:3].tolist()} .. {int(ids[-1])}), as d2t of EAGLE-3 does"
        yield Finding("token-map-offsets", found, "add the row's number to each entry")
        return
    yield from shared.word_ids(ids, vocab, "token-map", "ids", AGAIN)
