"""Medusa heads on the target's last hidden state (arXiv 2401.10774), and sequential ones, which also read the tokens
between (Hydra, arXiv 2402.05109).

Head i, from 0, at position p reads norm(hs[n]) of p and predicts x[p+2+i]; the target's own head predicts x[p+1].
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.drafts.base import Batch, Draft, DraftError, DraftLoss, draft_index, read_facts, supervised_rows
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.drafts.medusa_proposer import MedusaProposer
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher
from drafttrain.nn.tree import DynamicTree, StaticTree, Tree, TreeError
from drafttrain.target import Target
from drafttrain.target_head import TargetHead

MAP = "token_map"
"""The target ids of a smaller draft vocabulary, as vLLM calls them."""
SHARED = "lm_head.weight"
TREE_FILE = "medusa_tree.json"
"""{"paths": rank paths, ..} of the calibrated tree, where there is one, and how it was found."""


class Block(nn.Module):
    """One head's residual layers: h + SiLU(W [h / scale ; between] + b); `between` is read by the first one alone."""

    def __init__(self, size: int, layers: int, between: int):
        super().__init__()
        widths = [size * (1 + between), *[size] * (layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(width, size) for width in widths)

    def forward(self, hidden: Tensor, scale: Tensor, between: Tensor | None) -> Tensor:
        """hidden [.., H], scale fp32 [H], between [.., n * H] or None -> [.., H]."""
        for i, layer in enumerate(self.layers):
            x = (hidden.float() / scale).to(layer.weight.dtype)
            x = x if between is None or i else torch.cat([x, between.to(x.dtype)], -1)
            hidden = hidden + F.silu(layer(x)).to(hidden.dtype)
        return hidden


class MedusaDraft(Draft):
    """`blocks` draft; the vocabulary matrix is the target's own (frozen, not state) unless the heads have their own.

    Buffers: input_rms fp32 [H], the rms of each channel of norm(hs[n]), divided out before the layers (folded into
    their weights at export: channels of real targets differ by thousands); draft_ids int64 [Vd]. New blocks are zero,
    so that every head starts as the target's own. `tree`: the shape calibrated for it, if any, and in
    `tree_facts` what is known of it (evaluate/tree_calibration.py).
    """

    method = "medusa"

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.shape = config
        self.feature_layers: list[int] = []
        self.draft_vocab_size = config.draft_vocab_size
        H, K = config.hidden_size, config.num_heads
        self.blocks = nn.ModuleList(
            Block(H, config.num_hidden_layers, i + 1 if config.sequential else 0) for i in range(K)
        )
        own = K if config.own_heads else 0
        self.lm_heads = nn.ModuleList(nn.Linear(H, config.draft_vocab_size, bias=False) for _ in range(own))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        assert ids.shape == (config.draft_vocab_size,) and bool((ids.diff() > 0).all()) and ids[-1] < config.vocab_size
        self.register_buffer("input_rms", torch.ones(H))
        self.register_buffer("draft_ids", ids)
        self.head_decay, self.objective = 0.8, Objective.of("forward_kl")
        self.tree: StaticTree | None = None
        self.tree_facts: dict[str, Any] = {}
        self.embed_weight: Tensor | None = None
        self.teacher: TargetHead | None = None
        self._index: Tensor | None = None

    @property
    def steps(self) -> int:
        return self.shape.num_heads

    @property
    def max_k(self) -> int:
        return self.shape.num_heads

    @property
    def whole_vocabulary(self) -> bool:
        """Whether every word of the target is drafted."""
        return self.shape.whole_vocabulary

    @property
    def start_limit(self) -> float:
        """No limit: a new head says what the target says one token early, which may be worse than guessing."""
        return float("inf")

    def attach(self, target: Target) -> Self:
        """Take the target's norm, head rows and embeddings. Raises DraftError where the sizes do not fit."""
        found, expected = (target.vocab_size, target.hidden_size), (self.shape.vocab_size, self.shape.hidden_size)
        if found != expected:
            raise DraftError(
                f"The target {target.name} has vocabulary {found[0]} and hidden size {found[1]}; these heads expect "
                f"vocabulary {expected[0]} and hidden size {expected[1]}. Mend: give the target they were trained for."
            )
        self.teacher = target.head() if self.whole_vocabulary else target.head(self.draft_ids)
        self.embed_weight = target.embed_weight.detach() if self.shape.sequential else None
        self._index = None if self.whole_vocabulary else draft_index(self.draft_ids, self.shape.vocab_size)
        return self

    @torch.no_grad()
    def initialise(self) -> Self:
        """Start own heads as copies of the target's."""
        assert self.teacher is not None, "attach a target first"
        for head in self.lm_heads:
            head.weight.copy_(self.teacher.weight)
        return self

    @torch.no_grad()
    def calibrate(self, batch: Batch) -> float:
        """Set input_rms over the batch's supervised positions; returns the first head's loss in nats a row."""
        assert self.teacher is not None, "attach a target first"
        rows = self.teacher.normed(batch.last_hidden)[batch.loss_mask.bool()].float()
        self.input_rms.copy_(rows.square().mean(0).sqrt().clamp_min(1e-6))
        figures = self(batch).figures
        return float(figures.loss[0] / figures.rows[0])

    def embed(self, tokens: Tensor) -> Tensor:
        """Target ids [..] -> embeddings of rms 1, [.., H]; only sequential heads read them."""
        rows = F.embedding(tokens, self.embed_weight).float()
        return F.rms_norm(rows, rows.shape[-1:], eps=1e-6)

    def state(self, i: int, normed: Tensor, between: Tensor | None) -> Tensor:
        """What head i's vocabulary matrix reads: normed [.., H] = norm(hs[n]) at p -> [.., H]. between [.., i + 1, H]:
        embeddings of x[p+1] to x[p+1+i], of sequential heads.
        """
        return self.blocks[i](normed, self.input_rms, None if between is None else between.flatten(-2))

    def logits(self, i: int, state: Tensor) -> Tensor:
        """Head i's logits [.., Vd] over the draft vocabulary, from `state` [.., H]."""
        if not self.lm_heads:
            return self.teacher.logits(state)
        return self.own_head(i).logits(state)

    def own_head(self, i: int) -> TargetHead:
        """Head i with its own matrix, and what the target does to logits."""
        teacher = self.teacher
        return TargetHead(teacher.norm, self.lm_heads[i].weight, teacher.bias, teacher.softcap, teacher.scale)

    def forward(self, batch: Batch) -> DraftLoss:
        """The sum over the heads of head_decay^i times the loss of the rows that count there."""
        assert self.teacher is not None, "attach a target first"
        teacher, tokens = self.teacher, batch.input_ids
        normed = teacher.normed(batch.last_hidden)
        ahead = None
        if self.embed_weight is not None:
            embedded = self.embed(tokens)
            ahead = torch.stack([F.pad(embedded, (0, 0, 0, 1 + j))[:, 1 + j :] for j in range(self.steps)], -2)
        states = [self.state(i, normed, None if ahead is None else ahead[..., : i + 1, :]) for i in range(self.steps)]
        weights = [head.weight for head in self.lm_heads] or [teacher.weight]
        next_token = F.pad(tokens[:, 1:], (0, 1))
        objective, figures, _ = fused_draft_loss(
            states,
            [DraftHead(weight, teacher.bias, teacher.softcap, teacher.scale) for weight in weights],
            supervised_rows(batch.loss_mask.bool(), self.steps),
            [self.head_decay**i for i in range(self.steps)],
            DenseTeacher(teacher, batch.last_hidden, None if self.whole_vocabulary else batch.target_lse),
            self.objective,
            self._indices(batch.target_argmax),
            self._indices(next_token),
        )
        return DraftLoss(objective, figures)

    def _indices(self, tokens: Tensor | None) -> Tensor | None:
        return tokens if tokens is None or self._index is None else self._index[tokens]

    def proposer(self, target: Target, tree: Tree | None = None) -> MedusaProposer:
        """A proposer with these very weights: chains, or trees of a fixed shape. DraftError for others, and for trees
        deeper than the heads.
        """
        if isinstance(tree, DynamicTree):
            raise DraftError(
                f"the tree {tree} grows with the draft's confidence along a path, which Medusa heads do not know. Mend:"
                " a fixed shape (evaluation.tree.paths), or none: a calibrated one comes with the draft."
            )
        if tree is not None and tree.depth > self.shape.num_heads:
            raise DraftError(
                f"the tree is {tree.depth} deep, the draft has {self.shape.num_heads} heads. Expected at most as deep. "
                "Mend: a shallower tree."
            )
        return MedusaProposer(self, tree)

    def save_pretrained(self, folder: Path) -> None:
        """config.json and model.safetensors: the trained weights and buffers in their own dtype, as they are here."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self.shape.save(folder, next(self.parameters()).dtype)
        if self.tree is not None:
            (folder / TREE_FILE).write_text(tree_text(self.tree, self.tree_facts))

    @classmethod
    def from_pretrained(cls, folder: Path, dtype: torch.dtype | None = None) -> "MedusaDraft":
        """Read masters, or an export: scales folded in, the vocabulary as token_map, and the target's matrix beside it
        where it is shared, which is left alone. DraftError where it is broken.
        """
        config = MedusaConfig.load(folder)
        path = folder / "model.safetensors"
        if not path.exists():
            raise DraftError(f"{folder} has no model.safetensors. Expected Medusa heads. Mend: check the path.")
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise DraftError(f"{path} cannot be read ({error}). Mend: export or download the draft again.") from error
        if not config.own_heads:
            tensors.pop(SHARED, None)
        tensors.setdefault("input_rms", torch.ones(config.hidden_size))
        if MAP in tensors:
            tensors["draft_ids"] = tensors.pop(MAP).long()
        ids = tensors.setdefault("draft_ids", torch.arange(config.vocab_size))
        rising = ids.dim() == 1 and bool((ids.diff() > 0).all())
        if ids.shape != (config.draft_vocab_size,) or not rising or ids[0] < 0 or ids[-1] >= config.vocab_size:
            raise DraftError(
                f"{path}: {MAP} of shape {tuple(ids.shape)} is no draft vocabulary. Expected {config.draft_vocab_size} "
                f"ids that rise strictly within 0..{config.vocab_size - 1}. Mend: export the draft again."
            )
        draft = cls(config, ids)
        expected = draft.state_dict()
        wrong = sorted(expected.keys() ^ tensors.keys()) or [
            f"{name} {tuple(tensors[name].shape)} for {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if tensors[name].shape != tensor.shape
        ]
        if wrong:
            raise DraftError(
                f"{path}: tensors do not fit the config: {', '.join(wrong[:6])}. Expected {config.num_heads} heads of "
                f"{config.num_hidden_layers} layers with biases. Mend: export the draft again."
            )
        draft.to(dtype or tensors["blocks.0.layers.0.weight"].dtype)
        draft.load_state_dict(tensors)
        draft.input_rms = tensors["input_rms"].float()
        if (folder / TREE_FILE).exists():
            draft.tree, draft.tree_facts = read_tree(folder / TREE_FILE, config.num_heads)
        return draft


def tree_text(tree: StaticTree, facts: Mapping[str, Any]) -> str:
    """The content of `TREE_FILE`."""
    return json.dumps({"paths": tree.paths(), **facts}) + "\n"


def read_tree(path: Path, heads: int) -> tuple[StaticTree, dict[str, Any]]:
    """A calibrated tree and its facts; DraftError where the file holds none, or one deeper than the heads."""
    facts = read_facts(path)
    try:
        tree = StaticTree.from_paths(facts.pop("paths"))
    except (KeyError, TypeError, TreeError) as error:
        raise DraftError(
            f"{path} holds no tree ({error}). Expected paths such as [[0], [1], [0, 0]]. Mend: export the draft again; "
            "without the file chains are drafted."
        ) from error
    if tree.depth > heads:
        raise DraftError(f"{path}: the tree is {tree.depth} deep, the draft has {heads} heads. Mend: export it again.")
    return tree, facts
