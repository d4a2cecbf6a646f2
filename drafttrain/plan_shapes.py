"""Parameters of a recipe's draft, by part, and what its step is made of, from configs alone: small models laid out on
the meta device, EAGLE-3 and Medusa by formula.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.fresh_student import fresh_config, spread
from drafttrain.drafts.loading import find_draft
from drafttrain.drafts.medusa_config import HEADS
from drafttrain.plan_candidates import Outline, PlanError
from drafttrain.plan_target import LayerShape, ModelOutline, TargetOutline, outline_model
from drafttrain.recipe import DraftConfig, LoraConfig, Recipe
from drafttrain.recipe_rules import student_kind
from drafttrain.target import TargetError, check_feature_layers, default_feature_layers
from drafttrain.target_files import find_folder, read_config

FP32 = 4


@dataclass(frozen=True)
class Part:
    """Parameters under one name. trained: fp32 masters; otherwise `itemsize` bytes each, 0 for the target's own
    tensors, which are counted there.
    """

    name: str
    parameters: int
    trained: bool
    itemsize: int = FP32


@dataclass(frozen=True)
class DraftOutline:
    """A draft's parameters by part, and what its step is made of.

    steps: unroll steps or heads; shape and depth: of the layers that each step, or a small model once, runs through;
    body: their parameters that a token is multiplied with; head_rows, head_width: of the vocabulary matrix;
    learns_head: whether that trains; heads: how many there are. feature_layers: the hs[k] read beside hs[n].
    """

    method: str
    parts: tuple[Part, ...]
    steps: int
    head_rows: int
    head_width: int
    learns_head: bool
    shape: LayerShape
    depth: int
    body: int
    feature_layers: tuple[int, ...] = ()
    fused: int = 0
    """A Ht: channels of all the features that are fused."""
    heads: int = 1
    copies: int = 0
    """Bytes of what the draft copies from the target: head rows of a smaller vocabulary."""
    lora: int = 0
    """Parameters of adapters on the target itself (Medusa-2)."""
    between: int = 0
    """Embeddings of tokens that all heads together read (sequential Medusa heads)."""
    learns_table: bool = False

    @property
    def trained(self) -> int:
        return sum(part.parameters for part in self.parts if part.trained)

    @property
    def frozen(self) -> int:
        return sum(part.parameters for part in self.parts if not part.trained)


def outline_draft(recipe: Recipe, target: TargetOutline, student: ModelOutline | None = None) -> DraftOutline:
    """The draft that the recipe trains on this target. student: of a small model whose config is not at hand.

    DraftError, PlanError or TargetError for one that cannot be.
    """
    if recipe.method == "kd":
        return _small_model(recipe, target, student)
    return _eagle3(recipe, target) if recipe.method == "eagle3" else _medusa(recipe, target)


def _rows(recipe: Recipe, target: TargetOutline) -> int:
    return min(recipe.data.draft_vocab or target.model.vocab, target.model.vocab)


def _eagle3(recipe: Recipe, target: TargetOutline) -> DraftOutline:
    """fc [A Ht -> H]; first layer: q, k, v of [2H], o, gated feed-forward, three norms; deeper ones: Llama's layer."""
    draft, model = recipe.draft, target.model
    n, Ht = len(model.layers), model.H
    asked = recipe.features.layers
    depth, rows = draft.num_hidden_layers or 1, _rows(recipe, target)
    if draft.init_from is not None:
        draft = Eagle3Config.load(find_draft(draft.init_from), n)  # It keeps its own shape, layers and vocabulary.
        asked, depth, rows = draft.feature_layers, draft.num_hidden_layers, draft.draft_vocab_size
    features = default_feature_layers(n) if asked is None else check_feature_layers(asked, n)
    shape = _eagle3_shape(draft, target)
    H = shape.H
    qkv, out, mlp = H * (shape.q + 2 * shape.kv), shape.q * H, 3 * H * shape.I
    first, deeper = 2 * qkv + out + mlp + 3 * H, qkv + out + mlp + 2 * H
    body = first + (depth - 1) * deeper
    fuse = len(features) * Ht * (H + draft.fc_norm + draft.norm_before_fc)
    wanted = recipe.draft.train_embeddings
    learns_table = wanted is True or (Ht != H and wanted is None)
    parts = [Part("fusion", fuse, True), Part("layers", body + H, True), Part("head", rows * H, True)]
    if Ht != H or wanted:
        parts.append(Part("embeddings", model.vocab * H, learns_table))
    # feature_rms fp32, d2t int64, t2d bool, and the index of draft words int64: buffers, not parameters.
    buffers = 4 * len(features) * Ht + 8 * rows + 9 * model.vocab
    return DraftOutline(
        "eagle3",
        tuple(parts),
        recipe.training.ttt_steps,
        rows,
        H,
        True,
        shape,
        depth,
        body,
        tuple(features),
        len(features) * Ht,
        copies=rows * Ht * target.itemsize + buffers,
        learns_table=learns_table,
    )


def _eagle3_shape(draft: DraftConfig | Eagle3Config, target: TargetOutline) -> LayerShape:
    """What the recipe leaves open is the target's own."""
    theirs = target.model.shape
    nh = draft.num_attention_heads or theirs.nh
    inner = draft.intermediate_size or target.model.config.to_dict()["intermediate_size"]
    kv_heads, head_dim = draft.num_key_value_heads or min(theirs.nkv, nh), draft.head_dim or theirs.D
    return LayerShape(draft.hidden_size or theirs.H, inner, nh, kv_heads, head_dim)


def _medusa(recipe: Recipe, target: TargetOutline) -> DraftOutline:
    """Each head: L layers [H -> H] with bias; the i-th sequential one reads [(2 + i) H] first. Vocabulary matrices of
    their own, or the target's rows.
    """
    draft, model = recipe.draft, target.model
    K, L, H, rows = draft.num_heads or HEADS, draft.num_hidden_layers or 1, model.H, _rows(recipe, target)
    between = K * (K + 1) // 2 if draft.sequential else 0
    blocks = K * L * (H * H + H) + between * H * H
    parts = [Part("blocks", blocks, True)]
    if draft.own_heads:
        parts.append(Part("heads", K * rows * H, True))
    adapters = 0
    if draft.lora is not None:
        adapters = sum(_adapters(draft.lora, layer) for layer in model.linears)
        parts.append(Part("adapters", adapters, True))
    smaller = rows < model.vocab
    copies = (rows * H * target.itemsize + 8 * model.vocab if smaller else 0) + 8 * rows + 4 * H
    return DraftOutline(
        "medusa",
        tuple(parts),
        K,
        rows,
        H,
        draft.own_heads,
        model.shape,
        L,
        blocks,
        heads=K if draft.own_heads else 1,
        copies=copies,
        lora=adapters,
        between=between,
    )


def _adapters(lora: LoraConfig, linears: tuple[tuple[str, int, int], ...]) -> int:
    """A [r, in] and B [out, r] beside each linear layer that is named; all of a layer's for None."""
    wanted = lora.target_modules
    chosen = [pair for pair in linears if wanted is None or any(f".{pair[0]}".endswith(f".{want}") for want in wanted)]
    return sum(lora.r * (inside + outside) for _, inside, outside in chosen)


def _small_model(recipe: Recipe, target: TargetOutline, student: ModelOutline | None) -> DraftOutline:
    """pruned: layers and final norm of the target's, its tables shared; fresh and sibling: a model of their own."""
    draft, kind = recipe.draft, student_kind(recipe.draft)
    if kind == "pruned":
        small, kept = target.model, _kept(draft, len(target.model.layers))
        item = 0
    else:
        small = student or outline_model(_student_config(draft, target, kind))
        kept, item = range(len(small.layers)), target.itemsize
    body = sum(small.layers[i] for i in kept)
    tables = draft.train_embeddings
    if tables is None:
        tables = kind == "fresh" or (kind == "sibling" and draft.lora is None)
    parts = [Part("layers", body + small.norm, draft.lora is None, item)]
    if draft.lora is not None:
        parts.append(Part("adapters", sum(_adapters(draft.lora, small.linears[i]) for i in kept), True))
    parts.append(Part("embeddings", small.table, tables, item))
    if small.head:
        parts.append(Part("head", small.head, tables, item))
    rows, smaller = _rows(recipe, target), (recipe.data.draft_vocab or small.vocab) < target.model.vocab
    copies = 0
    if smaller:
        copies = rows * target.model.H * target.itemsize + 8 * target.model.vocab
        copies += 0 if tables else rows * small.H * target.itemsize  # The student's frozen rows, a copy too.
    share = small.active / sum(small.layers)
    return DraftOutline(
        "kd",
        tuple(part for part in parts if part.parameters),
        1,
        rows,
        small.H,
        bool(tables),
        small.shape,
        len(kept),
        round(body * share),
        copies=copies,
        learns_table=bool(tables),
    )


def _kept(draft: DraftConfig, n: int) -> list[int]:
    """The layers that a pruned student keeps; which of them importance would choose does not matter for their size."""
    if draft.keep_layers is not None:
        return list(draft.keep_layers)
    return spread(n, draft.num_hidden_layers or min(n, max(2, n // 3)))


def _student_config(draft: DraftConfig, target: TargetOutline, kind: str) -> PretrainedConfig:
    if kind == "fresh":
        return fresh_config(draft, Outline(target.model.config))
    try:
        folder = find_folder(draft.init_from, None, None, False, weights=False)
        return read_config(str(folder), False).get_text_config(decoder=True)
    except TargetError as error:
        raise PlanError(f"draft.init_from is {draft.init_from}, whose config is not here: {error}") from error
