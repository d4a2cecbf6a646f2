"""The EAGLE-3 draft (arXiv 2503.01840): a decoder layer, or a few, on fused target features, trained by unrolling it
on its own outputs.

Row p holds (fused hs at p, embedding of x[p+1]) and predicts x[p+2]; unroll step k consumes x[p+1+k] and the layer's
own output, sits at RoPE position p+k and predicts x[p+2+k]. Training and serving run the same `advance`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from drafttrain.drafts.base import Batch, Draft, DraftError, DraftLoss, draft_index, supervised_rows
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_files import read_tensors
from drafttrain.drafts.eagle3_layer import Attend, DeeperLayer, Eagle3Layer, RMSNorm
from drafttrain.drafts.eagle3_proposer import Eagle3Proposer
from drafttrain.drafts.eagle3_start import first_embeddings, first_head, is_table, normed_rms
from drafttrain.drafts.eagle3_tree import Eagle3TreeProposer
from drafttrain.nn.fused_losses import DraftHead, StepFigures, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.rotary import RotaryTable
from drafttrain.nn.teacher import DenseTeacher
from drafttrain.nn.tree import Tree
from drafttrain.nn.ttt_attention import ttt_attention, ttt_attention_dense
from drafttrain.target import Target


class Eagle3Draft(Draft):
    """fc fuses A target features, `midlayer` (and `layers`) draft, `lm_head` reads the draft vocabulary (FORMATS: the
    same tensor names).

    Buffers: feature_rms fp32 [A*Ht], the static rms of each channel that fc reads, divided out before it (folded into
    fc at export); d2t int64 [Vd], target id = i + d2t[i]; t2d bool [V]. `embed_weight` [V, Ht] and `teacher` are the
    target's, not state.

    With norm_before_fc or fc_norm the division comes behind the norms: before them it would change what they divide
    by, and no weight of the exported form could make up for that, while behind them it is one factor a channel, as
    fc's columns are.
    """

    method = "eagle3"

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None):
        super().__init__()
        self.shape = config
        self.feature_layers = list(config.feature_layers)
        self.draft_vocab_size = config.draft_vocab_size
        H, Ht, A, eps = config.hidden_size, config.target_hidden_size, len(config.feature_layers), config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, H) if config.own_embeddings else None
        self.input_norm = RMSNorm(A * Ht, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(Ht, eps) for _ in range(A)) if config.fc_norm else None
        self.fc = nn.Linear(A * Ht, H, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.layers = nn.ModuleDict({str(i): DeeperLayer(config, i) for i in range(1, config.num_hidden_layers)})
        self.norm = RMSNorm(H, eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        assert ids.shape == (config.draft_vocab_size,) and bool((ids.diff() > 0).all()) and ids[-1] < config.vocab_size
        self.register_buffer("feature_rms", torch.ones(self.fc.in_features))
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))
        self.ttt_steps, self.step_decay, self.objective = 7, 0.8, Objective.of("forward_kl")
        self.trained_before = False  # Its weights are another training's, which `calibrate` must not touch.
        self.embed_weight: Tensor | None = None
        self.teacher = None
        self._draft_index: Tensor | None = None
        self._rotary = RotaryTable(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )

    @property
    def steps(self) -> int:
        return self.ttt_steps

    @property
    def draft_ids(self) -> Tensor:
        """The target ids of the draft vocabulary, int64 [Vd], strictly rising."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def attach(self, target: Target) -> Self:
        """Take the raw embedding table and the teacher's head rows. Raises DraftError where the sizes do not fit."""
        config = self.shape
        found = (target.vocab_size, target.hidden_size, target.num_layers)
        expected = (config.vocab_size, config.target_hidden_size, max(config.feature_layers))
        if found[:2] != expected[:2] or found[2] < expected[2]:
            raise DraftError(
                f"The target {target.name} has vocabulary {found[0]}, hidden size {found[1]} and {found[2]} layers; "
                "this draft "
                f"expects vocabulary {expected[0]}, hidden size {expected[1]} and at least {expected[2]} layers. "
                "Mend: give the target it was trained for."
            )
        if config.hidden_size != target.hidden_size and not config.own_embeddings:
            raise DraftError(
                f"The draft's hidden size is {config.hidden_size}, the target's embeddings have {target.hidden_size}. "
                "Expected the same size, or embed_tokens.weight in the checkpoint. Mend: export the draft again."
            )
        self.embed_weight = target.embed_weight.detach()
        self.teacher = target.head(self.draft_ids)
        self._draft_index = draft_index(self.draft_ids, config.vocab_size)
        return self

    @torch.no_grad()
    def initialise(self, feature_rms: Tensor, final_rms: Tensor, seed: int = 0) -> Self:
        """Start from the target: head = its rows, fc = the last feature passed through, norm = a share of its final
        scale; of another hidden size as `first_head` has it.

        feature_rms [A*Ht], final_rms [Ht]: rms of each channel of the features and of the NORMED last hidden state.
        The share is set by `calibrate`. (Measured on Gemma 3 270M: the target's own norm weights start at 70 nats,
        this below 9.3.)
        """
        assert self.teacher is not None, "attach a target first"
        config = self.shape
        if config.fc_norm or config.norm_before_fc:
            feature_rms = normed_rms(feature_rms, len(config.feature_layers) if config.fc_norm else 1)
        self.feature_rms.copy_(feature_rms)
        passed, head, gain = first_head(self.teacher.weight, final_rms.to(self.d2t.device), config.hidden_size)
        self.lm_head.weight.copy_(head)
        nn.init.zeros_(self.fc.weight)
        self.fc.weight[:, -config.target_hidden_size :].copy_(passed)
        self.norm.weight.copy_(gain)
        if self.embed_tokens is not None:
            self.embed_tokens.weight.copy_(first_embeddings(self.embed_weight, config.hidden_size))
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.midlayer, *self.layers.values()):
            for block in (layer.self_attn, layer.mlp):
                for weight in block.parameters():
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        return self

    @torch.no_grad()
    def calibrate(self, batch: Batch, shares=(1.0, 0.5, 0.25, 0.125, 0.0625)) -> float:
        """Scale the final norm by the share with the lowest step-0 loss on one batch; returns that loss in nats a
        row. A draft that was trained before is only measured.
        """
        assert self.teacher is not None, "attach a target first"
        start, steps = self.norm.weight.clone(), self.ttt_steps
        shares = (1.0,) if self.trained_before else shares
        self.ttt_steps = 1
        losses = []
        for share in shares:
            self.norm.weight.copy_(start * share)
            figures = self(batch).figures
            losses.append(float(figures.loss[0] / figures.rows[0]))
        best = min(range(len(shares)), key=losses.__getitem__)
        self.norm.weight.copy_(start * shares[best])
        self.ttt_steps = steps
        return losses[best]

    def train_embeddings(self, wanted: bool | None) -> Self:
        """Whether embeddings of the draft's own learn; None: where its hidden size is not the target's. wanted gives a
        draft that has none a copy of the target's.
        """
        other_size = self.shape.hidden_size != self.shape.target_hidden_size
        if wanted and self.embed_tokens is None:
            own = nn.Embedding.from_pretrained(self.embed_weight.to(self.fc.weight.dtype, copy=True))
            self.embed_tokens, self.shape = own, replace(self.shape, own_embeddings=True)
        if self.embed_tokens is not None:
            self.embed_tokens.requires_grad_(other_size if wanted is None else wanted)
        return self

    def share_embeddings(self) -> Self:
        """Read the target's embeddings where those in the checkpoint are a copy of them."""
        assert self.embed_weight is not None, "attach a target first"
        if self.embed_tokens is not None and is_table(self.embed_tokens.weight, self.embed_weight):
            self.embed_tokens, self.shape = None, replace(self.shape, own_embeddings=False)
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """features [B, T, A*Ht] -> hidden [B, T, H]. Norms and division happen in fp32: some channels are huge."""
        wide = features.float()
        if self.input_norm is not None:
            wide = self.input_norm(wide)
        if self.fc_norm is not None:
            parts = wide.chunk(len(self.fc_norm), -1)
            wide = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc((wide / self.feature_rms).to(self.fc.weight.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """Target token ids [B, T] -> raw embeddings [B, T, H] in the draft's dtype."""
        table = self.embed_weight if self.embed_tokens is None else self.embed_tokens.weight
        return F.embedding(tokens, table).to(self.fc.weight.dtype)

    def advance(self, tokens: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """One step of all layers: tokens int64 [B, T], hidden [B, T, H] -> what the next step is fed, [B, T, H]: the
        un-normed state, or the normed one with norm_output.
        """
        hidden = self.midlayer(self.embed(tokens).to(hidden.dtype), hidden, cos, sin, attend)
        for layer in self.layers.values():
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden) if self.shape.norm_output else hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """What `advance` gives [.., H] -> what the head reads."""
        return hidden if self.shape.norm_output else self.norm(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """What `advance` gives [.., H] -> logits [.., Vd]."""
        return self.lm_head(self.normed(hidden))

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, T, D] of positions int64 [B, T]."""
        return self._rotary(positions, dtype)

    def rotary_table(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin [P, D] of all positions, at least so many, where the weights are and in their dtype."""
        return self._rotary.table(count, self.fc.weight.device, self.fc.weight.dtype)

    def unroll(self, input_ids: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """The normed states of each step, [B, T, H] each: state k of row p predicts x[p+2+k] given the data's own
        tokens.
        """
        hidden, attend = self.fuse(features), self._unrolled_attention()
        rows = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = []
        for k in range(steps):
            tokens = F.pad(input_ids[:, 1 + k :], (0, min(1 + k, input_ids.shape[1])))
            cos, sin = self.rotary((rows + k)[None], hidden.dtype)
            hidden = self.advance(tokens, hidden, cos, sin, attend)
            states.append(self.normed(hidden))
        return states

    def _unrolled_attention(self) -> Attend:
        """Attention of an unroll: a layer's first call gives its step-0 keys, each later one a row's own key of that
        step. With a window the query of row i at step k, at position i + k, sees positions above i + k - window.
        """
        block: dict[int, tuple[Tensor, Tensor]] = {}
        own: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        window = self.shape.sliding_window

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = own.setdefault(layer, ([], []))
            if layer not in block:
                block[layer] = key, value
            else:
                keys.append(key)
                values.append(value)
            if window is None:
                return ttt_attention(query, *block[layer], list(keys), list(values))
            return ttt_attention_dense(query, *block[layer], keys[-window:], values[-window:], window - len(keys))

        return attend

    def forward(self, batch: Batch) -> DraftLoss:
        """The TTT objective of a batch: sum over steps k of step_decay^k times the loss of the rows that count
        there.
        """
        assert self.teacher is not None, "attach a target first"
        steps = min(self.ttt_steps, max(batch.input_ids.shape[1] - 2, 1))
        objective, figures, _ = fused_draft_loss(
            self.unroll(batch.input_ids, batch.features, steps),
            DraftHead(self.lm_head.weight),
            supervised_rows(batch.loss_mask.bool(), steps),
            [self.step_decay**k for k in range(steps)],
            DenseTeacher(self.teacher, batch.last_hidden, batch.target_lse),
            self.objective,
            self._draft_index[batch.target_argmax],
        )
        return DraftLoss(objective, pad_figures(figures, self.ttt_steps))

    def proposer(self, target: Target, tree: Tree | None = None) -> Eagle3Proposer:
        """A proposer that drafts step by step with a KV cache, with these very weights: chains, or trees."""
        return Eagle3Proposer(self) if tree is None else Eagle3TreeProposer(self, tree)

    def save_pretrained(self, folder: Path) -> None:
        """config.json and model.safetensors in the parameters' own dtype; feature_rms stays a tensor of its own."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self.shape.save(folder, self.fc.weight.dtype)

    @classmethod
    def from_pretrained(
        cls, folder: Path, dtype: torch.dtype | None = None, num_layers: int | None = None
    ) -> "Eagle3Draft":
        """Read a checkpoint of this package, an export (no feature_rms: it is folded in), or one in a layout that
        drafts/eagle3_files.py knows, for a target of num_layers layers. DraftError where it is broken.

        dtype None keeps what is stored; feature_rms stays fp32.
        """
        config, path = Eagle3Config.load(folder, num_layers), folder / "model.safetensors"
        tensors = read_tensors(folder)
        config = replace(config, own_embeddings="embed_tokens.weight" in tensors)
        tensors.setdefault("feature_rms", torch.ones(len(config.feature_layers) * config.target_hidden_size))
        if config.draft_vocab_size == config.vocab_size:
            tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
        if "d2t" not in tensors:
            raise DraftError(
                f"{path} has no d2t, but its draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} "
                "words. "
                "Expected the vocabulary map: without it every draft names a wrong token. Mend: export the draft again."
            )
        draft = cls(config, read_map(tensors["d2t"], config, path))
        tensors["t2d"] = draft.t2d
        expected = draft.state_dict()
        wrong = sorted(expected.keys() ^ tensors.keys()) or [
            f"{name} {tuple(tensors[name].shape)} for {tuple(t.shape)}"
            for name, t in expected.items()
            if t.shape != tensors[name].shape
        ]
        if wrong:
            layers = "one layer" if config.num_hidden_layers == 1 else f"{config.num_hidden_layers} layers"
            raise DraftError(
                f"{path}: tensors do not fit the config: {', '.join(wrong[:6])}. Expected the EAGLE-3 layout with "
                f"{layers}. "
                "Mend: export the draft again."
            )
        draft.to(dtype or tensors["fc.weight"].dtype)
        draft.load_state_dict(tensors)
        draft.feature_rms = tensors["feature_rms"].float()
        return draft


def read_map(d2t: Tensor, config: Eagle3Config, path: Path) -> Tensor:
    """The target ids int64 [Vd] of a stored d2t; DraftError unless they rise strictly within the target's
    vocabulary.
    """
    ids = d2t.long() + torch.arange(d2t.numel())
    if (
        d2t.shape != (config.draft_vocab_size,)
        or ids[0] < 0
        or ids[-1] >= config.vocab_size
        or bool((ids.diff() <= 0).any())
    ):
        raise DraftError(
            f"{path}: d2t of shape {tuple(d2t.shape)} is no vocabulary map. Expected {config.draft_vocab_size} target "
            f"ids i + d2t[i] that rise strictly within 0..{config.vocab_size - 1}. Mend: export the draft again."
        )
    return ids


def pad_figures(figures: StepFigures, steps: int) -> StepFigures:
    """Figures of fewer steps (a batch of very short rows) filled with zeros up to `steps`."""
    missing = steps - len(figures.rows)
    parts = (figures.rows, figures.loss, figures.hits, figures.alpha, figures.joint)
    return StepFigures(*(F.pad(part, (0, missing)) for part in parts))
