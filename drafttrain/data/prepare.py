"""`drafttrain prepare`: conversations -> (regenerated answers) -> ids and loss mask -> draft vocabulary -> (stored
features).

Every stage leaves its result in the run's prepared/ folder and is skipped when that is there and still fits.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import torch
from safetensors.torch import load_file, save_file

from drafttrain.data.chat import Encoded, audit, encode, prompt_ids
from drafttrain.data.conversations import Conversation, DataError, load_conversations
from drafttrain.data.features import (
    DTYPES,
    FeatureSource,
    OnlineFeatures,
    StoredFeatures,
    StoreKey,
    bytes_per_token,
    channel_statistics,
    write_store,
)
from drafttrain.data.files import replace_folder, write_beside, write_json
from drafttrain.data.progress import progress_bar
from drafttrain.data.regenerate import regenerate
from drafttrain.data.run_folder import RunFolder
from drafttrain.data.teacher_cache import TopKFeatures, TopKKey, write_topk
from drafttrain.data.vocab import DraftVocab, build_draft_vocab, coverage, load_vocab, save_vocab, special_ids
from drafttrain.drafts.students import check_student, kept_layers
from drafttrain.recipe import Recipe
from drafttrain.recipe_rules import student_kind
from drafttrain.target import Target, check_feature_layers, default_feature_layers

Say = Callable[[str], None]
TRAINED_SPLITS = ("train", "validation")
WHOLE_BYTES, PART_BYTES = 64 * 2**20, 2**20


@dataclass
class Prepared:
    """What training and evaluation need: rows {"index", "input_ids", "loss_mask"} of a split, draft vocabulary, rms
    of channels, and, for a pruned small model, the layers it keeps.
    """

    folder: Path
    manifest: dict
    rows: dict[str, list[dict]]
    vocab: DraftVocab
    statistics: dict[str, torch.Tensor]
    layers: list[int]
    kept_layers: list[int] | None = None

    def source(self, recipe: Recipe, target: Target, split: str) -> FeatureSource:
        """Where the features of a split come from, as the recipe says."""
        if not _stored(recipe, split):
            return online_source(recipe, target, self.layers)
        key = _store_key(recipe, target, self.layers, self.rows[split])
        return _open_store(self.folder / "features" / split, key, len(self.rows[split]))


def online_source(recipe: Recipe, target: Target, layers: list[int]) -> OnlineFeatures:
    """The target itself, run on each batch: the hs[k] of `layers`, and statistics where the draft needs them."""
    return OnlineFeatures(target, layers, DTYPES[recipe.features.dtype], needs_statistics(recipe))


def needs_statistics(recipe: Recipe) -> bool:
    """Whether the full vocabulary's log-sum-exp and argmax are taken with the features: a draft of every word finds
    them in its own loss.
    """
    return recipe.method == "eagle3" or recipe.data.draft_vocab is not None


def feature_layers(recipe: Recipe, target: Target) -> list[int]:
    """The hs[k] of the recipe, or the default three; none for other methods. TargetError where they do not fit."""
    if recipe.method != "eagle3":
        return []
    if recipe.features.layers is None:
        return default_feature_layers(target.num_layers)
    return check_feature_layers(recipe.features.layers, target.num_layers)


def prepare(recipe: Recipe, run: RunFolder, target: Target, say: Say = print) -> Prepared:
    """Bring the run's prepared/ folder up to date and return it. Raises DataError where the data cannot be trained
    on, DraftError for a small model that cannot be built.
    """
    layers = feature_layers(recipe, target)
    if recipe.method == "kd" and not (run.prepared / "manifest.json").exists():
        check_student(recipe.draft, target)
    run.prepared.mkdir(parents=True, exist_ok=True)
    manifest = _manifest(recipe, run, target)
    rows = {}
    for split in TRAINED_SPLITS:
        entries = recipe.data.train if split == "train" else recipe.data.validation
        if entries:
            rows[split] = _rows(split, entries, recipe, run, target, manifest, say)
    # Before anything that follows from the rows, so that nothing of it can be stale after an interruption.
    write_json(run.prepared / "manifest.json", manifest)
    vocab = _vocab(recipe, run, target, rows, manifest, say)
    sources = {}
    for split in rows:
        sources[split] = _source(split, recipe, run, target, layers, rows[split], say)
    statistics = _statistics(run, target, sources["train"], rows["train"], layers) if layers else {}
    kept = _kept_layers(recipe, target, rows["train"], manifest, say)
    write_json(run.prepared / "manifest.json", manifest)
    return Prepared(run.prepared, manifest, rows, vocab, statistics, layers, kept)


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
    return [{"index": i, **row} for i, row in enumerate(datasets.load_from_disk(folder))]


def _manifest(recipe: Recipe, run: RunFolder, target: Target) -> dict:
    """What the folder was prepared from; another target or other data settings need a fresh folder."""
    path = run.prepared / "manifest.json"
    settings = recipe.data.model_dump(mode="json", exclude={"test"})
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
    return {**made_of, "audit": {}, "coverage": {}}


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
        conversations = load_conversations(entries, recipe.data.seed)
        settings = recipe.data.regenerate
        if settings is not None and split in settings.splits:
            encoded = _regenerate(split, conversations, recipe, run, target)
        else:
            encoded = [_encode(one, recipe, target) for one in conversations]
        manifest["audit"][split] = audit(encoded, target.tokenizer)
        kept = [{"input_ids": e.input_ids, "loss_mask": e.loss_mask} for e in encoded if e.dropped is None]
        dataset = datasets.Dataset.from_list(kept)
        replace_folder(folder, lambda path: dataset.save_to_disk(path))
    facts = manifest["audit"][split]
    dropped = "".join(f"; dropped {count}: {reason}" for reason, count in facts["dropped"].items())
    say(
        f"{split}: {facts['conversations']} conversations, {facts['tokens']} tokens, "
        f"{facts['supervised_share']:.0%} supervised{dropped}"
    )
    if facts["unsupervised_stop"]:
        cut = facts["unsupervised_stop"]
        say(f"  note: {cut} answers end without a stop token (cut by a length limit, or the data has none)")
    return prepared_rows(run, split)


def _encode(conversation: Conversation, recipe: Recipe, target: Target) -> Encoded:
    return encode(
        conversation,
        target.tokenizer,
        chat=recipe.data.chat,
        max_length=recipe.data.max_length,
        stop_ids=target.stop_ids,
    )


def _regenerate(split, conversations, recipe: Recipe, run: RunFolder, target: Target) -> list[Encoded]:
    with progress_bar(f"answers ({split})", len(conversations)) as update:
        return regenerate(
            target,
            conversations,
            recipe.data.regenerate,
            run.prepared / f"regenerated-{split}.jsonl",
            chat=recipe.data.chat,
            max_length=recipe.data.max_length,
            progress=lambda tokens, done: update(done, f"{tokens} tokens"),
        )


def _vocab(recipe: Recipe, run: RunFolder, target: Target, rows: dict, manifest: dict, say: Say) -> DraftVocab:
    folder = run.prepared / "vocab"
    pairs = {split: [(row["input_ids"], row["loss_mask"]) for row in rows[split]] for split in rows}
    if folder.exists():
        vocab = load_vocab(folder, target, recipe.data.draft_vocab)
    else:
        vocab = build_draft_vocab(pairs["train"], target.vocab_size, recipe.data.draft_vocab, special_ids(target))
        replace_folder(folder, lambda path: save_vocab(vocab, path, target, recipe.data.draft_vocab))
    manifest["coverage"] = {split: coverage(vocab, pairs[split]) for split in pairs}
    shown = ", ".join(f"{split} {share:.1%}" for split, share in manifest["coverage"].items())
    say(f"draft vocabulary: {len(vocab.ids)} of {target.vocab_size} tokens; covers {shown} of what the target says")
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


def _stored(recipe: Recipe, split: str) -> bool:
    """Whether a split's features are written. Validation asks the target itself where training has only its likeliest
    words: acceptance measured on those would be too high.
    """
    return recipe.features.source == "store" or (recipe.features.source == "topk" and split == "train")


def _store_key(recipe: Recipe, target: Target, layers: list[int], rows: list[dict]) -> StoreKey | TopKKey:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row["input_ids"], row["loss_mask"])).encode())
    if recipe.features.source == "topk":
        return TopKKey(target.fingerprint, recipe.features.top_k, digest.hexdigest())
    dtype = recipe.features.dtype
    return StoreKey(target.fingerprint, tuple(layers), dtype, digest.hexdigest(), needs_statistics(recipe))


def _open_store(folder: Path, key: StoreKey | TopKKey, rows: int) -> FeatureSource:
    return TopKFeatures(folder, key, rows) if isinstance(key, TopKKey) else StoredFeatures(folder, key, rows)


def _source(split, recipe: Recipe, run: RunFolder, target: Target, layers, rows: list[dict], say: Say) -> FeatureSource:
    online = online_source(recipe, target, layers)
    if not _stored(recipe, split):
        return online
    tokens = sum(len(row["input_ids"]) for row in rows)
    key = _store_key(recipe, target, layers, rows)
    width = bytes_per_token(key, target.hidden_size)
    folder = run.prepared / "features" / split
    say(f"features ({split}): {tokens} tokens x {width} bytes = {tokens * width / 2**30:.2f} GiB in {folder}")
    with progress_bar(f"features ({split})", tokens) as update:
        if isinstance(key, TopKKey):
            write_topk(folder, key, target, rows, recipe.features.batch_tokens, update)
        else:
            write_store(folder, key, online, rows, recipe.features.batch_tokens, update)
    return _open_store(folder, key, len(rows))


def _statistics(run: RunFolder, target: Target, source: FeatureSource, rows: list[dict], layers: list[int]) -> dict:
    path = run.prepared / f"statistics-{'-'.join(map(str, layers))}.safetensors"
    if not path.exists():
        statistics = channel_statistics(source, target, rows)
        write_beside(path, partial(save_file, statistics))
    return load_file(path)


def conversation_prompt(conversation: Conversation, target: Target, chat: str) -> list[int]:
    """The token ids of a conversation up to the target's first answer. DataError for plain text, which has no
    prompt.
    """
    if conversation.messages is not None:
        users = [i for i, message in enumerate(conversation.messages) if message["role"] == "user"]
        return prompt_ids(conversation.messages[: users[0] + 1], target.tokenizer, chat)
    if conversation.prompt is not None:
        return prompt_ids([{"role": "user", "content": conversation.prompt}], target.tokenizer, chat)
    raise DataError(
        f"{conversation.source}: found no prompt, expected messages or prompt; plain text cannot be answered"
    )
