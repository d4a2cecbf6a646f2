"""Medusa-2: heads and low-rank adapters on the target, trained together (arXiv 2401.10774, section 2.2.2).

The target that serves is the tuned one; a divergence to the unchanged target, the anchor, holds on to its quality.
"""

from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.drafts.adapters import add_adapters, merged
from drafttrain.drafts.base import Batch, Draft, DraftError, DraftLoss, ParameterGroup
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.drafts.medusa_proposer import MedusaProposer
from drafttrain.drafts.small_model import sharing_copy
from drafttrain.drafts.student_parts import body_names, check_plain, run_student, set_trained, text_model
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher, argmax
from drafttrain.nn.tree import StaticTree, Tree
from drafttrain.recipe import LoraConfig, TrainingConfig
from drafttrain.target import Target, find_decoder
from drafttrain.target_head import TargetHead

ADAPTERS = "adapters.safetensors"
CHUNK = 256


class Medusa2Draft(Draft):
    """`heads`, and `model`: the target's own tensors, frozen, with fp32 adapters beside its linear layers.

    The heads learn from the tuned model, which will verify their drafts: their figures are the acceptance as served.
    figures.drift compares it with the unchanged target. `anchor`: weight of KL(unchanged || tuned) over the full
    vocabulary; the adapters learn at `scale` times the learning rate, from step `first_step` on.
    """

    method = "medusa"

    def __init__(
        self, heads: MedusaDraft, model: PreTrainedModel, anchor: float = 1.0, scale: float = 0.1, first_step: int = 0
    ):
        super().__init__()
        self.heads, self.model = heads, model
        self.feature_layers: list[int] = []
        self.draft_vocab_size = heads.draft_vocab_size
        self.anchor, self.scale, self.first_step = anchor, scale, first_step
        self._unchanged: TargetHead | None = None

    @classmethod
    def build(cls, heads: MedusaDraft, target: Target, lora: LoraConfig, training: TrainingConfig) -> Self:
        """New adapters on the target's decoder layers, which change nothing yet. DraftError for a target that is
        quantised or spread over several devices, and for modules that it does not have.
        """
        if target.spread:
            raise DraftError(
                f"draft.lora tunes {target.title}, which is spread over several devices. Expected a target on one "
                "device. Mend: leave target.device_map out, or draft.lora (Medusa-1)."
            )
        model = text_model(sharing_copy(target.model))
        body = body_names(model)
        for name, parameter in model.named_parameters():
            if name in body:
                check_plain(name, parameter.detach())
        model = add_adapters(set_trained(model, set()), lora, training.seed)
        rate = training.target_learning_rate
        scale = 0.1 if rate is None else rate / training.learning_rate
        return cls(heads, model, training.anchor, scale, training.warmup_heads_steps).attach(target)

    @property
    def steps(self) -> int:
        return self.heads.steps

    @property
    def max_k(self) -> int:
        return self.heads.max_k

    @property
    def shape(self) -> MedusaConfig:
        return self.heads.shape

    @property
    def start_limit(self) -> float:
        return self.heads.start_limit

    @property
    def tree(self) -> StaticTree | None:
        return self.heads.tree

    @tree.setter
    def tree(self, tree: StaticTree | None) -> None:
        self.heads.tree = tree

    @property
    def objective(self) -> Objective:
        """Of the heads; the anchor is always the forward KL."""
        return self.heads.objective

    @objective.setter
    def objective(self, objective: Objective) -> None:
        self.heads.objective = objective

    def attach(self, target: Target) -> Self:
        """Take what the heads take from the UNCHANGED target, and its whole head, which the tuned model shares."""
        self.heads.attach(target)
        self._unchanged = target.head()
        return self

    def activation_checkpointing_enable(self, **options) -> None:
        """What the Trainer calls for training.gradient_checkpointing."""
        self.model.activation_checkpointing_enable(**options)

    def calibrate(self, batch: Batch) -> float:
        """As of heads alone: the adapters change nothing yet."""
        return self.heads.calibrate(batch)

    def adapters(self) -> dict[str, Tensor]:
        """The adapters' parameters by their names in `model`."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(list(self.adapters().values()), self.scale, self.first_step)]

    @property
    def tuned(self) -> bool:
        """Whether the adapters have left their start, where the model is the unchanged target."""
        return any(bool(p.any()) for name, p in self.adapters().items() if ".lora_B." in name)

    def forward(self, batch: Batch) -> DraftLoss:
        """The heads' loss on the tuned model's states, against its own distribution held fixed, and the anchor."""
        assert self._unchanged is not None, "attach a target first"
        # Not in a lower precision: the model is to compute here as the unchanged target did, and as it will serve.
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            states = last_hidden(self.model, batch.input_ids)
            anchor, drift = self._anchor(states, batch)
            lse, choice = (None, None) if self.heads.whole_vocabulary else self._statistics(states, batch)
        loss = self.heads(replace(batch, last_hidden=states, target_lse=lse, target_argmax=choice))
        return DraftLoss(loss.objective + anchor, replace(loss.figures, drift=drift))

    def _anchor(self, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """anchor * sum of KL(unchanged || tuned) over the rows whose next token is supervised, and `drift` [3]."""
        head = self._unchanged
        tuned = head.normed(states if self.anchor else states.detach())
        # The loss pairs row p with the teacher at p + 1: one position more makes that the same position.
        loss, figures, _ = fused_draft_loss(
            [F.pad(tuned, (0, 0, 0, 1))],
            DraftHead(head.weight, head.bias, head.softcap, head.scale),
            F.pad(_asked(batch), (0, 1))[None],
            [self.anchor],
            DenseTeacher(head, F.pad(batch.last_hidden, (0, 0, 1, 0))),
            Objective.of("forward_kl"),
        )
        return loss, torch.stack([figures.rows[0], figures.loss[0], figures.hits[0]])

    @torch.no_grad()
    def _statistics(self, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The tuned model's target_lse and target_argmax [B, T] over the full vocabulary, where they are asked for."""
        asked = _asked(batch)
        lse = torch.zeros(asked.shape, device=states.device)
        choice = torch.zeros_like(batch.input_ids)
        logits = [self._unchanged(part).float() for part in states[asked].split(CHUNK)]
        lse[asked] = torch.cat([z.logsumexp(-1) for z in logits])
        choice[asked] = torch.cat([argmax(z) for z in logits])
        return lse, choice

    def trained_state(self) -> dict[str, Tensor]:
        """The heads and the adapters: the model's other tensors are the target's."""
        adapters = {f"model.{name}" for name in self.adapters()}
        return {name: t for name, t in self.state_dict().items() if name.startswith("heads.") or name in adapters}

    def load_trained_state(self, tensors: dict[str, Tensor]) -> None:
        odd = sorted(self.trained_state().keys() ^ tensors.keys())
        if odd:
            raise DraftError(
                f"a checkpoint holds {', '.join(odd[:4])} unlike these heads and adapters. Expected the same trained "
                "parameters. Mend: resume with the recipe that the run was begun with."
            )
        self.load_state_dict(tensors, strict=False)

    def plain_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The tuned target as a frozen model of that dtype, adapters merged; what else it is of is shared."""
        model = merged(self.model, dtype)
        model.config.dtype = dtype
        return model

    def served_by(self, target: Target) -> Target:
        """The unchanged target as the adapters of now tune it, in its own dtype."""
        return Target.from_model(self.plain_model(target.dtype), target.tokenizer, f"{target.name}, tuned")

    def proposer(self, target: Target, tree: Tree | None = None) -> MedusaProposer:
        """A proposer of the heads for `target`, which is to be the tuned one: `served_by`."""
        return self.heads.proposer(target, tree)

    def save_pretrained(self, folder: Path) -> None:
        """The fp32 masters: the heads as `MedusaDraft` writes them, and the adapters beside them."""
        self.heads.save_pretrained(folder)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.adapters().items()}
        save_file(tensors, folder / ADAPTERS, metadata={"format": "pt"})


def _asked(batch: Batch) -> Tensor:
    """bool [B, T]: the positions whose next token is supervised, i.e. where the target speaks."""
    asked = batch.loss_mask.bool().roll(-1, 1)
    asked[:, -1] = False
    return asked


def last_hidden(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """hs[n] [B, T, H] of a model, in front of its final norm, from input_ids int64 [B, T], padded on the right."""
    _, norm = find_decoder(model)
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        run_student(model, input_ids)
    finally:
        handle.remove()
    return seen[0]
