"""Checks of any kind of draft: sound numbers, one dtype, no quantisation, the target's tokenizer and positions."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from drafttrain.drafts.base import tokenizer_hash
from drafttrain.export.check_files import Finding, StoredDraft, TargetFacts
from drafttrain.target_files import TOKENIZER_FILES, read_tokenizer

AGAIN = "export the draft again (drafttrain export)"


def some(names: list[str], count: int = 4) -> str:
    """The first names, and how many more."""
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")


def numbers(draft: StoredDraft, zero_is_fine: tuple[str, ...] = ()) -> Iterator[Finding]:
    """NaN, Inf and tensors of zeros; zero_is_fine: endings of names that may be zero."""
    broken, zero = draft.unsound
    if broken:
        mend = "go back to an earlier checkpoint, or export.dtype=bfloat16 where float16 overflowed"
        yield Finding("not-finite", f"NaN or Inf in {some(broken)}", mend)
    zero = [name for name in zero if not name.endswith(zero_is_fine or ("\0",))]
    if zero:
        yield Finding("all-zero", f"only zeros in {some(zero)}", f"train the draft, or {AGAIN}")


def word_ids(ids: Tensor, vocab: int, code: str, what: str, mend: str) -> Iterator[Finding]:
    """Target ids int64 [Vd] of a draft vocabulary that are out of range, named twice or do not rise; code: how the
    findings' codes begin, what: how the ids are called.
    """
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        yield Finding(f"{code}-out-of-range", f"{what} {int(ids.min())}..{int(ids.max())} of {vocab}", mend)
    if len(ids.unique()) < len(ids):
        yield Finding(f"{code}-colliding", f"{len(ids) - len(ids.unique())} words named twice", mend)
    elif bool((ids.diff() < 0).any()):
        yield Finding(f"{code}-unsorted", f"{what} that do not rise", mend)


def dtypes(draft: StoredDraft, values: Mapping[str, Any], apart: tuple[str, ...] = ()) -> Iterator[Finding]:
    """More than one floating dtype, or another than the config says; apart: names that do not count."""
    found = {kind: [n for n in names if n not in apart] for kind, names in draft.float_dtypes.items()}
    found = {kind: names for kind, names in found.items() if names}
    if len(found) > 1:
        rare = min(found, key=lambda kind: len(found[kind]))
        text = f"{' and '.join(sorted(found))} tensors; {rare}: {some(found[rare])}"
        yield Finding("dtype-mixed", text, AGAIN)
    said = values.get("torch_dtype") or values.get("dtype")
    if said and len(found) == 1 and said.removeprefix("torch.") not in found:
        yield Finding("dtype-config", f"torch_dtype {said}, stored {next(iter(found))}", f"write {next(iter(found))}")


def quantization(draft: StoredDraft, values: Mapping[str, Any]) -> Iterator[Finding]:
    """A quantization_config over plain floating weights: the target's, copied along. Packed weights may have one."""
    settings = values.get("quantization_config") or values.get("compression_config")
    packed = [n for n, header in draft.headers.items() if header.dtype.startswith(("F8", "F4")) or "scale" in n]
    packed += [n for n in draft.headers if n.endswith(("qweight", "weight_packed"))]
    if settings and not packed:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        found = f"quantization_config ({method}) and plain {'/'.join(sorted(draft.float_dtypes))} weights"
        yield Finding("quantization", found, "delete quantization_config from config.json: it is the target's")


def tied(values: Mapping[str, Any]) -> Iterator[Finding]:
    """tie_word_embeddings left true in a draft that has a head of its own."""
    if values.get("tie_word_embeddings"):
        yield Finding("tied-embeddings", "tie_word_embeddings true", "write tie_word_embeddings: false")


def positions(values: Mapping[str, Any], target: TargetFacts) -> Iterator[Finding]:
    """Fewer positions than the target's; Llama's config gives 2048 where none are said."""
    found = values.get("max_position_embeddings")
    if (found or 2048) < target.max_positions:
        said = f"max_position_embeddings {found}" if found else "no max_position_embeddings, which means 2048"
        mend = f"write {target.max_positions}; a draft trained on short rows alone still needs longer ones"
        yield Finding("positions", f"{said}, the target has {target.max_positions}", mend)


def tokenizer(draft: StoredDraft, target: TargetFacts) -> Iterator[Finding]:
    """Another tokenizer than the target's, by what drafttrain.json says or by the one that lies beside the draft; and
    heads of a target tuned together with them (Medusa-2) beside another.
    """
    facts, theirs = draft.facts, target.tokenizer
    if theirs is not None:
        said = facts.get("tokenizer_sha256")
        if said is None and any((draft.folder / name).is_file() for name in TOKENIZER_FILES[:2]):
            said = tokenizer_hash(read_tokenizer(str(draft.folder), False))
        if said and said != tokenizer_hash(theirs):
            mend = "give the target it was trained for, or train a draft for this one"
            yield Finding("tokenizer", f"made for {facts.get('target', 'a target')} with another tokenizer", mend)
    tuned = facts.get("tuned_from")
    if tuned and target.fingerprint not in (None, facts.get("target_fingerprint")):
        found = f"trained together with a tuned {tuned.get('name')}, found {target.name}"
        yield Finding("tuned-target", found, f"--target {draft.folder / 'target'}")
