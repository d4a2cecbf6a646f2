"""The EAGLE-3 draft (arXiv 2503.01840): one decoder layer on fused target features, trained by unrolling it on its
own outputs.

Row p holds (fused hs at p, embedding of x[p+1]) and predicts x[p+2]; unroll step k consumes x[p+1+k] and the layer's
own output, sits at RoPE position p+k and predicts x[p+2+k]. Training and serving run the same `Eagle3Layer`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.drafts.base import Batch, Draft, DraftError, DraftLoss, draft_index, supervised_rows
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_proposer import Eagle3Proposer
from drafttrain.drafts.eagle3_tree import Eagle3TreeProposer
from drafttrain.nn.fused_losses import DraftHead, StepFigures, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.rotary import RotaryTable, rotate
from drafttrain.nn.teacher import DenseTeacher
from drafttrain.nn.tree import Tree
from drafttrain.nn.ttt_attention import ttt_attention
from drafttrain.target import Target

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B, nh, T, D], key, value [B, nkv, T, D]) -> output [B, nh, T, D]: the one thing that training and serving
do apart.
"""


class RMSNorm(nn.Module):
    """x * weight / rms(x), in fp32 inside."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(
            x.dtype
        )


class Attention(nn.Module):
    """q, k, v projections of [norm(embedding) ; norm(hidden)] and the output projection."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """The one decoder layer. Its output, un-normed, is what the next draft step is fed."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """embedded, hidden [B, T, H] -> hidden [B, T, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        hidden = residual + self.self_attn(x, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(Draft):
    """fc fuses A target features, `midlayer` drafts, `lm_head` reads the draft vocabulary (FORMATS: the same tensor
    names).

    Buffers: feature_rms fp32 [A*Ht], the static rms of each feature channel, divided out before fc (folded into fc at
    export); d2t int64 [Vd], target id = i + d2t[i]; t2d bool [V]. `embed_weight` [V, H] and `teacher` are the
    target's, not state.
    """

    method = "eagle3"

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None):
        super().__init__()
        self.shape = config
        self.feature_layers = list(config.feature_layers)
        self.draft_vocab_size = config.draft_vocab_size
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        assert ids.shape == (config.draft_vocab_size,) and bool((ids.diff() > 0).all()) and ids[-1] < config.vocab_size
        self.register_buffer("feature_rms", torch.ones(self.fc.in_features))
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))
        self.ttt_steps, self.step_decay, self.objective = 7, 0.8, Objective.of("forward_kl")
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
        if config.hidden_size != target.hidden_size:
            raise DraftError(
                f"The draft's hidden size is {config.hidden_size}, the target's embeddings have {target.hidden_size}. "
                "Expected the same size: this version trains no embeddings of its own. Mend: leave draft.hidden_size "
                "out."
            )
        self.embed_weight = target.embed_weight.detach()
        self.teacher = target.head(self.draft_ids)
        self._draft_index = draft_index(self.draft_ids, config.vocab_size)
        return self

    @torch.no_grad()
    def initialise(self, feature_rms: Tensor, final_rms: Tensor, seed: int = 0) -> Self:
        """Start from the target: head = its rows, fc = the last feature passed through, norm = a share of its final
        scale.

        feature_rms [A*Ht], final_rms [Ht]: rms of each channel of the features and of the NORMED last hidden state.
        The share is set by `calibrate`. (Measured on Gemma 3 270M: the target's own norm weights start at 70 nats,
        this below 9.3.)
        """
        assert self.teacher is not None, "attach a target first"
        self.feature_rms.copy_(feature_rms)
        self.lm_head.weight.copy_(self.teacher.weight.float())
        nn.init.zeros_(self.fc.weight)
        width = self.shape.target_hidden_size
        self.fc.weight[:, -width:].copy_(torch.eye(self.shape.hidden_size, width))
        generator = torch.Generator().manual_seed(seed)
        for block in (self.midlayer.self_attn, self.midlayer.mlp):
            for weight in block.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        self.norm.weight.copy_(final_rms)
        return self

    @torch.no_grad()
    def calibrate(self, batch: Batch, shares=(1.0, 0.5, 0.25, 0.125, 0.0625)) -> float:
        """Scale the final norm by the share with the lowest step-0 loss on one batch; returns that loss in nats a
        row.
        """
        assert self.teacher is not None, "attach a target first"
        start, steps = self.norm.weight.clone(), self.ttt_steps
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

    def fuse(self, features: Tensor) -> Tensor:
        """features [B, T, A*Ht] -> hidden [B, T, H]. The division happens in fp32: some channels are huge."""
        return self.fc((features.float() / self.feature_rms).to(self.fc.weight.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """Target token ids [B, T] -> raw embeddings [B, T, H] in the draft's dtype."""
        return F.embedding(tokens, self.embed_weight).to(self.fc.weight.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """The layer's output [.., H] -> logits [.., Vd]."""
        return self.lm_head(self.norm(hidden))

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
        hidden = self.fuse(features)
        rows = torch.arange(input_ids.shape[1], device=input_ids.device)
        block: list[Tensor] = []
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []

        def attend(query, key, value):
            if not block:
                block.extend((key, value))
            else:
                own_keys.append(key)
                own_values.append(value)
            return ttt_attention(query, *block, list(own_keys), list(own_values))

        states = []
        for k in range(steps):
            tokens = F.pad(input_ids[:, 1 + k :], (0, min(1 + k, input_ids.shape[1])))
            cos, sin = self.rotary((rows + k)[None], hidden.dtype)
            hidden = self.midlayer(self.embed(tokens).to(hidden.dtype), hidden, cos, sin, attend)
            states.append(self.norm(hidden))
        return states

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
    def from_pretrained(cls, folder: Path, dtype: torch.dtype | None = None) -> "Eagle3Draft":
        """Read a checkpoint of this package or an export (no feature_rms: it is folded in). DraftError where it is
        broken.

        dtype None keeps what is stored; feature_rms stays fp32.
        """
        config = Eagle3Config.load(folder)
        path = folder / "model.safetensors"
        if not path.exists():
            raise DraftError(
                f"{folder} has no model.safetensors. Expected an EAGLE-3 checkpoint. Mend: check the path."
            )
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise DraftError(f"{path} cannot be read ({error}). Mend: export or download the draft again.") from error
        tensors.setdefault("feature_rms", torch.ones(len(config.feature_layers) * config.target_hidden_size))
        if config.draft_vocab_size == config.vocab_size:
            tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
        if "d2t" not in tensors:
            raise DraftError(
                f"{path} has no d2t, but its draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} "
                "words. "
                "Expected the vocabulary map: without it every draft names a wrong token. Mend: export the draft again."
            )
        ids = read_map(tensors["d2t"], config, path)
        tensors.setdefault("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))
        draft = cls(config, ids)
        expected = draft.state_dict()
        wrong = sorted(expected.keys() ^ tensors.keys()) or [
            f"{name} {tuple(tensors[name].shape)} for {tuple(t.shape)}"
            for name, t in expected.items()
            if t.shape != tensors[name].shape
        ]
        if wrong:
            raise DraftError(
                f"{path}: tensors do not fit the config: {', '.join(wrong[:6])}. Expected the EAGLE-3 layout with "
                "one layer. "
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
