"""`drafttrain prepare`: conversations -> (regenerated answers) -> ids and loss mask -> draft vocabulary -> (stored
features).

Every stage leaves its result in the run's prepared/ folder and is skipped when that is there and still fits.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import datasets
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.data.batching import row_name
from drafttrain.data.chat import Encoded, audit, encode, prompt_ids
from drafttrain.data.chat_messages import RowError
from drafttrain.data.chat_template import AnyChat, Chat, chat_facts
from drafttrain.data.conversations import Conversation, DataError, load_conversations
from drafttrain.data.coverage import coverage_lines, coverage_table
from drafttrain.data.features import FeatureSource, channel_statistics
from drafttrain.data.files import is_full, replace_folder, write_beside, write_json
from drafttrain.data.progress import progress_bar
from drafttrain.data.regenerate import regenerate
from drafttrain.data.run_folder import RunFolder
from drafttrain.data.sources import (
    finite_samples,
    open_source,
    rows_digest,
    store_key,
    write_features,
)
from drafttrain.data.vocab import (
    BROUGHT,
    DraftVocab,
    build_draft_vocab,
    coverage,
    given_vocab,
    load_vocab,
    save_vocab,
    special_ids,
)
from drafttrain.drafts.loading import trained_before
from drafttrain.drafts.students import check_student, kept_layers
from drafttrain.recipe import Recipe
from drafttrain.recipe_rules import student_kind
from drafttrain.target import Target, check_feature_layers, default_feature_layers

Say = Callable[[str], None]
TRAINED_SPLITS = ("train", "validation")
WHOLE_BYTES, PART_BYTES = 64 * 2**20, 2**20


@dataclass
class Prepared:
    """What training and evaluation need: rows {"index", "input_ids", "loss_mask", "source", "domain"} of a split,
    draft vocabulary, rms of channels, and, for a pruned small model, the layers it keeps.

    Rows whose stored features are not finite are left out of `rows`; digests: rows_digest and count of all rows of a
    split, which a store belongs to.
    """

    folder: Path
    manifest: dict
    rows: dict[str, list[dict]]
    vocab: DraftVocab
    statistics: dict[str, torch.Tensor]
    layers: list[int]
    kept_layers: list[int] | None = None
    digests: dict[str, tuple[str, int]] = field(default_factory=dict)

    def source(self, recipe: Recipe, target: Target, split: str) -> FeatureSource:
        """Where the features of a split come from, as the recipe says."""
        digest, count = self.digests[split]
        key = store_key(recipe, target, self.layers, split, digest)
        return open_source(recipe, target, self.layers, key, self.folder / "features" / split, count)


def feature_layers(recipe: Recipe, target: Target) -> list[int]:
    """The hs[k] of the recipe, or the default three; none for other methods. TargetError where they do not fit."""
    if recipe.method != "eagle3":
        return []
    if recipe.features.layers is None:
        return default_feature_layers(target.num_layers)
    return check_feature_layers(recipe.features.layers, target.num_layers)


def prepare(recipe: Recipe, run: RunFolder, target: Target, say: Say = print, confirmed: bool = False) -> Prepared:
    """Bring the run's prepared/ folder up to date and return it; confirmed: also where the features take much of the
    disk. Raises DataError where the data cannot be trained on or the disk is full, DraftError for a small model that
    cannot be built.
    """
    try:
        return _prepare(recipe, run, target, say, confirmed)
    except (OSError, SafetensorError) as error:
        if not is_full(error):
            raise
        raise DataError(
            f"{run.prepared} could not be written ({error}). What is whole in it stays. Mend: free some space, then "
            "run the same command to go on."
        ) from error


def _prepare(recipe: Recipe, run: RunFolder, target: Target, say: Say, confirmed: bool) -> Prepared:
    if recipe.method == "kd" and not (run.prepared / "manifest.json").exists():
        check_student(recipe.draft, target)
    run.prepared.mkdir(parents=True, exist_ok=True)
    for leftover in run.prepared.glob(".*.tmp"):  # Of a process that was killed.
        leftover.unlink()
    manifest = _manifest(recipe, run, target)
    brought = None
    if _goes_on(recipe):
        layers, brought = _trained_before(recipe, run, target, manifest)
    else:
        layers = feature_layers(recipe, target)
    rows = {}
    for split in TRAINED_SPLITS:
        entries = recipe.data.train if split == "train" else recipe.data.validation
        if entries:
            rows[split] = _rows(split, entries, recipe, run, target, manifest, say)
            _check_budget(rows[split], recipe.training.max_tokens_per_batch)
    # Before anything that follows from the rows, so that nothing of it can be stale after an interruption.
    _write_manifest(run, manifest)
    vocab = _vocab(recipe, run, target, rows, manifest, brought, say)
    digests = {split: (rows_digest(rows[split]), len(rows[split])) for split in rows}
    sources = _sources(recipe, run, target, layers, rows, digests, say, confirmed)
    for split in rows:
        rows[split] = finite_samples(sources[split], rows[split], recipe.features.dtype, split, say)
    measured = layers and not _goes_on(recipe)
    statistics = _statistics(run, target, sources["train"], rows["train"], layers) if measured else {}
    kept = _kept_layers(recipe, target, rows["train"], manifest, say)
    _write_manifest(run, manifest)
    return Prepared(run.prepared, manifest, rows, vocab, statistics, layers, kept, digests)


def _write_manifest(run: RunFolder, manifest: dict) -> None:
    """Where it is another: the processes of a launch that come here behind the first one write nothing."""
    path = run.prepared / "manifest.json"
    if not path.exists() or json.loads(path.read_text()) != json.loads(json.dumps(manifest)):
        write_json(path, manifest)


def load_prepared(recipe: Recipe, run: RunFolder, target: Target) -> Prepared:
    """What `prepare` left, without doing any of it again. DataError when it is missing or belongs to other data."""
    if not (run.prepared / "manifest.json").exists():
        raise DataError(f"{run.path}: nothing is prepared; run `drafttrain prepare` first")
    return prepare(recipe, run, target, say=lambda message: None)


def prepared_rows(run: RunFolder, split: str) -> list[dict]:
    """The rows of a split as `prepare` left them, whatever the target is now. DataError where there are none."""
    folder = run.prepared / split
    if not folder.exists():
        raise DataError(f"{run.path}: {split} is not prepared; run `drafttrain prepare` first")
    unnamed = {"source": "", "domain": ""}  # Folders from before rows had names.
    return [{"index": i, **unnamed, **row} for i, row in enumerate(datasets.load_from_disk(folder))]


def _check_budget(rows: list[dict], budget: int) -> None:
    """Before hours go into features: every row must fit into a batch of training."""
    longest = max(rows, key=lambda row: len(row["input_ids"]))
    length = len(longest["input_ids"])
    if length > budget:
        raise DataError(
            f"{row_name(longest)} has {length} tokens, training.max_tokens_per_batch is {budget}. Expected room for "
            "every sample. Mend: raise it, or lower data.max_length"
        )


def _manifest(recipe: Recipe, run: RunFolder, target: Target) -> dict:
    """What the folder was prepared from; another target or other data settings need a fresh folder."""
    path = run.prepared / "manifest.json"
    asked = {"server", "model", "concurrency", "endpoint"}  # Who answered stands in regenerated-*.jsonl.
    settings = recipe.data.model_dump(mode="json", exclude={"test": True, "regenerate": asked})
    if not recipe.data.chat_template_kwargs:
        del settings["chat_template_kwargs"]
    entries = [*recipe.data.train, *recipe.data.validation]
    files = {
        entry.path: content_mark(Path(entry.path)) for entry in entries if entry.path and Path(entry.path).exists()
    }
    made_of = {"target": target.name, "fingerprint": target.fingerprint, "data": settings, "files": files}
    if path.exists():
        found = json.loads(path.read_text())
        changed = [path for path, mark in files.items() if found.get("files", {}).get(path) != mark]
        if changed:
            raise DataError(
                f"{', '.join(changed)} changed since {run.prepared} was made of it; give another --output, or remove "
                "that folder"
            )
        if all(found.get(key) == made_of[key] for key in ("fingerprint", "data")):
            return found
        raise DataError(
            f"{run.prepared} was prepared for {found.get('target')} with other data, tokenizer, template or settings; "
            "give another --output, or remove the folder"
        )
    return {**made_of, "chat": chat_facts(target.tokenizer, Chat.of(recipe)), "audit": {}, "coverage": {}}


def content_mark(path: Path) -> str:
    """Tells an edited data file from the one before: sha256 of its bytes; of files over 64 MB the size and three
    parts.
    """
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with open(file, "rb") as handle:
                for start in (0,) if size <= WHOLE_BYTES else (0, size // 2, size - PART_BYTES):
                    handle.seek(start)
                    digest.update(handle.read(size if size <= WHOLE_BYTES else PART_BYTES))
    return digest.hexdigest()


def _rows(split, entries, recipe: Recipe, run: RunFolder, target: Target, manifest: dict, say: Say) -> list[dict]:
    folder = run.prepared / split
    if split not in manifest["audit"] or not folder.exists():
        conversations = load_conversations(entries, recipe.data.seed, f"data.{split}")
        settings = recipe.data.regenerate
        if settings is not None and split in settings.splits:
            encoded = _regenerate(split, conversations, recipe, run, target, say)
        else:
            encoded = [_encode(one, recipe, target) for one in conversations]
        manifest["audit"][split] = audit(encoded, target.tokenizer)
        names = ("input_ids", "loss_mask", "source", "domain")
        kept = [{name: getattr(e, name) for name in names} for e in encoded if e.dropped is None]
        dataset = datasets.Dataset.from_list(kept)
        replace_folder(folder, lambda path: dataset.save_to_disk(path))
    facts = manifest["audit"][split]
    first = facts.get("dropped_first", {})
    dropped = "".join(
        f"; dropped {count}: {reason}" + (f" (first {first[reason]})" if first.get(reason) else "")
        for reason, count in facts["dropped"].items()
    )
    say(
        f"{split}: {facts['conversations']} conversations, {facts['tokens']} tokens, "
        f"{facts['supervised_share']:.0%} supervised{dropped}"
    )
    if facts["unsupervised_stop"]:
        cut = facts["unsupervised_stop"]
        say(f"  note: {cut} answers end without a stop token (cut by max_new_tokens, max_length, or the data has none)")
    return prepared_rows(run, split)


def _encode(conversation: Conversation, recipe: Recipe, target: Target) -> Encoded:
    return encode(
        conversation,
        target.tokenizer,
        chat=Chat.of(recipe),
        max_length=recipe.data.max_length,
        stop_ids=target.stop_ids,
    )


def _regenerate(split, conversations, recipe: Recipe, run: RunFolder, target: Target, say: Say) -> list[Encoded]:
    with progress_bar(f"answers ({split})", len(conversations)) as update:
        return regenerate(
            target,
            conversations,
            recipe.data.regenerate,
            run.prepared / f"regenerated-{split}.jsonl",
            chat=Chat.of(recipe),
            max_length=recipe.data.max_length,
            progress=lambda tokens, done: update(done, f"{tokens} tokens"),
            say=say,
        )


def _goes_on(recipe: Recipe) -> bool:
    """Whether training starts from an EAGLE-3 draft, which has feature layers and a vocabulary of its own."""
    return recipe.method == "eagle3" and recipe.draft.init_from is not None


def _trained_before(recipe: Recipe, run: RunFolder, target: Target, manifest: dict) -> tuple[list[int], Tensor | None]:
    """(feature layers, draft vocabulary int64 [Vd]) of draft.init_from; no vocabulary where it is prepared already, so
    that a run can be evaluated without the draft that it started from. DraftError as `trained_before`.
    """
    name, known = recipe.draft.init_from, manifest.get("start", {})
    if known.get("init_from") == name and (run.prepared / "vocab").exists():
        return known["layers"], None
    draft = trained_before(recipe, target)
    manifest["start"] = {"init_from": name, "layers": draft.feature_layers}
    return draft.feature_layers, draft.draft_ids.cpu()


def _vocab(
    recipe: Recipe, run: RunFolder, target: Target, rows: dict, manifest: dict, brought: Tensor | None, say: Say
) -> DraftVocab:
    folder, size = run.prepared / "vocab", BROUGHT if _goes_on(recipe) else recipe.data.draft_vocab
    pairs = {split: [(row["input_ids"], row["loss_mask"]) for row in rows[split]] for split in rows}
    if folder.exists():
        vocab = load_vocab(folder, target, size)
        if brought is not None and not torch.equal(vocab.ids, brought):
            raise DataError(
                f"{folder} is stale: it is another vocabulary than that of draft.init_from {recipe.draft.init_from}; "
                "prepare the data again with --fresh"
            )
    else:
        if brought is None:
            vocab = build_draft_vocab(pairs["train"], target.vocab_size, size, special_ids(target))
        else:
            vocab = given_vocab(brought, pairs["train"], target.vocab_size)
        replace_folder(folder, lambda path: save_vocab(vocab, path, target, size))
    manifest["coverage"] = {split: coverage(vocab, pairs[split]) for split in pairs}
    shown = ", ".join(f"{split} {share:.1%}" for split, share in manifest["coverage"].items())
    if size == BROUGHT and recipe.data.draft_vocab != len(vocab.ids):
        say(f"  note: data.draft_vocab is {recipe.data.draft_vocab}; the draft of draft.init_from keeps its own words")
    say(f"draft vocabulary: {len(vocab.ids)} of {target.vocab_size} tokens; covers {shown} of what the target says")
    if "vocabulary" not in manifest:
        manifest["vocabulary"] = coverage_table(vocab, rows, target.vocab_size, special_ids(target))
    for line in coverage_lines(manifest["vocabulary"]):
        say(line)
    return vocab


def _kept_layers(recipe: Recipe, target: Target, rows: list[dict], manifest: dict, say: Say) -> list[int] | None:
    """The layers of the target that a pruned small model keeps; chosen once, so that a resumed run has the same."""
    settings = recipe.draft
    if recipe.method != "kd" or student_kind(settings) != "pruned":
        return None
    asked = [settings.keep_layers, settings.num_hidden_layers, settings.choose_layers]
    if manifest.get("kept_layers", {}).get("asked") != asked:
        kept = kept_layers(settings, target, [row["input_ids"] for row in rows])
        manifest["kept_layers"] = {"asked": asked, "layers": kept}
    kept = manifest["kept_layers"]["layers"]
    say(f"student: layers {' '.join(map(str, kept))} of the target's {target.num_layers}")
    return kept


def _sources(
    recipe: Recipe, run: RunFolder, target: Target, layers: list[int], rows, digests, say: Say, confirmed: bool
) -> dict[str, FeatureSource]:
    """The source of each split, its store written where the recipe has one."""
    sources, room = {}, recipe.features.max_gib
    for split, (digest, count) in digests.items():
        folder = run.prepared / "features" / split
        key = store_key(recipe, target, layers, split, digest)
        if key is not None:
            room = write_features(recipe, target, layers, key, folder, rows[split], say, room, confirmed)
        sources[split] = open_source(recipe, target, layers, key, folder, count)
    return sources


def _statistics(run: RunFolder, target: Target, source: FeatureSource, rows: list[dict], layers: list[int]) -> dict:
    path = run.prepared / f"statistics-{'-'.join(map(str, layers))}.safetensors"
    if not path.exists():
        statistics = channel_statistics(source, target, rows)
        write_beside(path, partial(save_file, statistics))
    return load_file(path)


def conversation_prompt(conversation: Conversation, target: Target, chat: AnyChat) -> list[int]:
    """The token ids of a conversation up to the target's first answer. DataError for plain text, which has no prompt;
    RowError for one that the chat template refuses.
    """
    if conversation.refused:
        raise RowError(conversation.source, conversation.refused)
    if conversation.messages is not None:
        users = [i for i, message in enumerate(conversation.messages) if message["role"] == "user"]
        asked = conversation.messages[: users[0] + 1]
        return prompt_ids(asked, target.tokenizer, chat, conversation.tools, conversation.source)
    if conversation.prompt is not None:
        return prompt_ids([{"role": "user", "content": conversation.prompt}], target.tokenizer, chat)
    raise DataError(
        f"{conversation.source}: found no prompt, expected messages or prompt; plain text cannot be answered"
    )
