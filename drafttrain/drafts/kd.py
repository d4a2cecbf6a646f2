"""A small causal language model of the target's vocabulary, distilled from the target (arXiv 2310.08461, 2306.13649).

Position p+1 predicts x[p+2], as the teacher there does: rows, labels and figures are those of the other drafts.
"""

import json
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.drafts.base import Batch, Draft, DraftError, DraftLoss, draft_index, read_facts, supervised_rows
from drafttrain.drafts.quantized import quantized
from drafttrain.drafts.small_model import SmallModelProposer
from drafttrain.drafts.students import align_vocabulary, check_tokenizers, merged, run_student, token_count
from drafttrain.nn.fused_losses import DraftHead, StepFigures, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher, TopKTeacher
from drafttrain.nn.tree import Tree
from drafttrain.target import Target, load_target
from drafttrain.target_head import logit_shape

DEPTH = 4
"""The figures look so many tokens ahead: hits of consecutive positions, all given the data's own tokens."""
IDS_FILE = "draft_ids.json"
"""Not safetensors: vLLM reads every such file of the folder as weights, and would not start."""


class KdDraft(Draft):
    """`student`: the small model, its frozen parameters shared with the target where it was cut from it.

    draft_ids int64 [Vd]: the words that training and our own proposer use, the whole vocabulary unless a smaller one
    was asked for; the written model keeps every word. The teacher is the target's, and not state.
    """

    method = "kd"

    def __init__(self, student: PreTrainedModel, draft_ids: Tensor | None = None, tokenizer=None, name: str = "kd"):
        super().__init__()
        self.student, self.name = student, name
        self.feature_layers: list[int] = []
        rows = student.get_output_embeddings().weight.shape[0]
        self.draft_ids = torch.arange(rows) if draft_ids is None else draft_ids
        self.draft_vocab_size = len(self.draft_ids)
        self.objective = Objective.of("forward_kl")
        self.teacher = None
        self._tokenizer = tokenizer
        self._index: Tensor | None = None
        self._frozen_rows: Tensor | None = None
        self._small: Target | None = None
        self._starts_worse = False
        self.aligned = False
        """Whether `attach` gave it other rows than its folder has."""

    @property
    def steps(self) -> int:
        return DEPTH

    @property
    def start_limit(self) -> float:
        """No limit for a pruned model: its layers do not fit together yet, and it may start worse than guessing."""
        return float("inf") if self._starts_worse else super().start_limit

    @property
    def shape(self) -> PretrainedConfig:
        """The student's text config."""
        return self.student.config.get_text_config(decoder=True)

    @property
    def whole_vocabulary(self) -> bool:
        """Whether every word of the model is drafted."""
        return self.draft_vocab_size == self.student.get_output_embeddings().weight.shape[0]

    def starts_worse_than_guessing(self) -> Self:
        """Lift the start-up limit; returns itself."""
        self._starts_worse = True
        return self

    def attach(self, target: Target) -> Self:
        """Take the teacher's head. Vocabularies padded to other sizes are aligned; DraftError where they differ."""
        rows = self.student.get_output_embeddings().weight.shape[0]
        check_tokenizers(self._tokenizer, target, rows)
        if rows != target.vocab_size:
            if self._tokenizer is None or not self.whole_vocabulary:
                raise DraftError(
                    f"the small model {self.name} has a vocabulary of {rows}, {target.name} one of "
                    f"{target.vocab_size}. Expected the same tokens under the same ids. Mend: a small model of the "
                    "target's own family and generation."
                )
            align_vocabulary(self.student, target.vocab_size, token_count(self._tokenizer))
            self.aligned = True
            self.draft_ids = torch.arange(target.vocab_size)
            self.draft_vocab_size = target.vocab_size
        self.draft_ids = self.draft_ids.to(target.device)
        self._index = None
        if not self.whole_vocabulary:
            self._index = draft_index(self.draft_ids, target.vocab_size)
        self.teacher = target.head() if self.whole_vocabulary else target.head(self.draft_ids)
        self._dtype, self._tokenizer = target.dtype, target.tokenizer
        self._small = None
        return self

    def activation_checkpointing_enable(self, **options) -> None:
        """What the Trainer calls for training.gradient_checkpointing."""
        self.student.activation_checkpointing_enable(**options)

    def calibrate(self, batch: Batch) -> float:
        """The forward KL of one batch, in nats a row; nothing is set."""
        objective, self.objective = self.objective, Objective.of("forward_kl")
        with torch.no_grad():
            figures = self(batch).figures
        self.objective = objective
        return float(figures.loss[0] / figures.rows[0])

    def forward(self, batch: Batch) -> DraftLoss:
        """The distillation loss of a batch, over the rows that serving uses: x[p+1] and x[p+2] are the target's."""
        assert self.teacher is not None, "attach a target first"
        states = run_student(self.student, batch.input_ids)
        valid = supervised_rows(batch.loss_mask.bool(), DEPTH)
        objective, figures, hit = fused_draft_loss(
            [F.pad(states[:, 1:], (0, 0, 0, 1))],
            self._head(),
            valid[:1],
            [1.0],
            self._teacher(batch),
            self.objective,
            target_index=self._indices(batch.target_argmax),
            token_index=self._indices(F.pad(batch.input_ids[:, 1:], (0, 1))),
        )
        return DraftLoss(objective, ahead(figures, hit[0].view(valid.shape[1:]), valid))

    def _indices(self, tokens: Tensor | None) -> Tensor | None:
        return tokens if tokens is None or self._index is None else self._index[tokens]

    def _head(self) -> DraftHead:
        head = self.student.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if not self.whole_vocabulary:
            if weight.requires_grad:
                weight = weight[self.draft_ids]
            else:
                if self._frozen_rows is None:
                    self._frozen_rows = weight[self.draft_ids]
                weight = self._frozen_rows
            bias = None if bias is None else bias[self.draft_ids]
        return DraftHead(weight, bias, *logit_shape(self.shape.to_dict()))

    def _teacher(self, batch: Batch) -> DenseTeacher | TopKTeacher:
        if batch.topk_ids is not None:
            return TopKTeacher(self._indices(batch.topk_ids), batch.topk_log_p)
        assert self.whole_vocabulary or batch.target_lse is not None, "a smaller vocabulary needs the whole one's lse"
        assert self.objective.temperature == 1 or batch.target_lse is None, "a temperature needs every word's logits"
        return DenseTeacher(self.teacher, batch.last_hidden, batch.target_lse)

    def trained_state(self) -> dict[str, Tensor]:
        """The trained parameters alone: frozen ones are the target's, or the sibling's."""
        return {name: p for name, p in self.student.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_trained_state(self, tensors: dict[str, Tensor]) -> None:
        trained = self.trained_state()
        if trained.keys() != tensors.keys():
            raise DraftError(
                f"a checkpoint holds {', '.join(sorted(trained.keys() ^ tensors.keys())[:4])} unlike this student. "
                "Expected the same trained parameters. Mend: resume with the recipe that the run was begun with."
            )
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])

    def plain_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A frozen model of that dtype, adapters merged; frozen weights that have it already are shared, not copied."""
        model = merged(self.student, dtype)
        model.config.dtype = dtype
        # The target's, where the student was cut from one: transformers would take the plain weights for its codes.
        vars(model.config).pop("quantization_config", None)
        vars(model).pop("hf_quantizer", None)
        return model

    @torch.no_grad()
    def small_target(self) -> Target:
        """The student with its present weights as a model that generates, in the target's dtype. The same object at
        each call, refreshed.
        """
        assert self.teacher is not None, "attach a target first"
        if self._small is None:
            model = self.plain_model(self._dtype)
            self._small = Target.from_model(model, self._tokenizer, self.name)
        else:
            fresh = dict(self.plain_model(self._dtype).named_parameters())
            for name, parameter in self._small.model.named_parameters():
                if parameter.data_ptr() != fresh[name].data_ptr():
                    parameter.copy_(fresh[name])
        return self._small

    def proposer(self, target: Target, tree: Tree | None = None, quantize: str | None = None) -> SmallModelProposer:
        """A proposer that drafts chains with this very model. quantize: int8 or int4 weights. DraftError for trees."""
        if tree is not None:
            raise DraftError("small models draft chains only. Mend: leave the tree out, or take an EAGLE-3 draft.")
        proposer = SmallModelProposer(self.small_target(), None if self.whole_vocabulary else self.draft_ids.cpu())
        if quantize is not None:
            proposer.model = quantized(proposer.model, quantize)  # Behind the choice of rows: packed ones have none.
        return proposer

    def save_pretrained(self, folder: Path) -> None:
        """The fp32 masters: trained parameters, adapters merged, under the names of the written model."""
        frozen = {p.data_ptr() for p in self.student.parameters() if not p.requires_grad}
        whole = merged(self.student).named_parameters()
        tensors = {name: p.detach().float().cpu() for name, p in whole if p.data_ptr() not in frozen}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    @classmethod
    def from_pretrained(cls, folder: Path, dtype: torch.dtype | None = None) -> "KdDraft":
        """Any causal language model's folder, frozen, in the stored dtype unless another is given."""
        name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        small = load_target(str(folder), dtype=name)
        path = folder / IDS_FILE
        ids = _read_ids(path, small.vocab_size) if path.exists() else None
        facts = folder / "drafttrain.json"
        title = read_facts(facts).get("student", small.title) if facts.exists() else small.title
        return cls(small.model, ids, small.tokenizer, title)


def _read_ids(path: Path, vocab_size: int) -> Tensor:
    """A draft vocabulary, int64 [Vd]; DraftError unless it is a JSON list of rising ids below vocab_size."""
    try:
        ids = torch.tensor(json.loads(path.read_text(encoding="utf-8")), dtype=torch.long)
        sound = ids.dim() == 1 and len(ids) and ids[0] >= 0 and ids[-1] < vocab_size and bool((ids.diff() > 0).all())
    except (OSError, ValueError, TypeError, RuntimeError):
        sound = False
    if not sound:
        raise DraftError(
            f"{path} is not a draft vocabulary. Expected a JSON list of rising token ids below {vocab_size}. Mend: "
            "export the draft again; without the file every word is drafted."
        )
    return ids


def ahead(figures: StepFigures, hit: Tensor, valid: Tensor) -> StepFigures:
    """Figures of DEPTH steps from those of one: step k is row p+k's hit where rows p to p+k all count.

    hit bool [B, T]: whether the draft's choice at row p is the target's; valid bool [DEPTH, B, T]. Loss and alpha of
    the later steps are means of all rows, scaled to the rows that count there: a small model has no steps of its own.
    """
    rows = valid.sum((1, 2)).float()
    share = rows / rows[0].clamp_min(1)
    hits, joint, so_far = [], [], torch.ones_like(hit)
    for k, counts in enumerate(valid):
        later = F.pad(hit[:, k:], (0, k))
        so_far = so_far & later
        hits.append((later & counts).sum())
        joint.append((so_far & counts).sum())
    return StepFigures(
        rows, figures.loss[0] * share, torch.stack(hits).float(), figures.alpha[0] * share, torch.stack(joint).float()
    )
