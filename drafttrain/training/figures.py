"""What the log says of the steps since its last line: summed figures as rates, and how well the machine is used."""

import torch
from torch import Tensor, nn

from drafttrain.data.store import GIB
from drafttrain.drafts.base import Draft
from drafttrain.evaluate.roofline import RooflineError, find_device
from drafttrain.evaluate.runner import process_peak
from drafttrain.nn.fused_losses import StepFigures


def parts(figures: StepFigures) -> tuple[Tensor, ...]:
    """Its tensors, in the order that makes it again."""
    return figures.rows, figures.loss, figures.hits, figures.alpha, figures.joint, figures.drift


def added(sums: StepFigures | None, figures: StepFigures) -> StepFigures:
    """The sums with more figures; None: there are none yet."""
    if sums is None:
        return figures
    return StepFigures(*(a + b for a, b in zip(parts(sums), parts(figures), strict=True)))


def rates(sums: StepFigures, prefix: str) -> dict[str, float]:
    """Means of summed figures: step_loss/k, step_acceptance/k (top-1 hits, teacher-forced, unconditional),
    step_alpha/k, and, with the prefix eval_, loss and teacher_forced_length. Of a tuned target (Medusa-2) also
    target_drift, KL(unchanged || tuned) in nats, and target_same_choice, the share of positions with the same choice.
    """
    rows = sums.rows.clamp_min(1).tolist()
    out: dict[str, float] = {}
    for k, count in enumerate(rows):
        out[f"{prefix}step_acceptance/{k}"] = sums.hits[k].item() / count
        out[f"{prefix}step_alpha/{k}"] = sums.alpha[k].item() / count
        out[f"{prefix}step_loss/{k}"] = sums.loss[k].item() / count
    compared, divergence, same = sums.drift.tolist()
    if compared:
        out[f"{prefix}target_drift"], out[f"{prefix}target_same_choice"] = divergence / compared, same / compared
    if prefix:
        out[f"{prefix}loss"] = sums.loss[0].item() / rows[0]
        out[f"{prefix}teacher_forced_length"] = 1 + sum(j / n for j, n in zip(sums.joint.tolist(), rows, strict=True))
    return out


def flops_per_token(draft: Draft) -> float:
    """What training multiplies a token of the draft with, forward and backward:

        4 F + S (6 P + 4 Q)

    P: elements of the trained matrices, a product each forward, for the weight and for the input; Q: of frozen ones,
    which take no gradient themselves. S passes: EAGLE-3's unroll steps, else 1; F: EAGLE-3's fc, which all of them
    share, and whose input takes no gradient. Of Medusa heads on the target's vocabulary matrix, Q has that matrix once
    for each head. Attention's own products, the target's forward and the teacher's logits are left out, and every token
    counts as trained: so the figure is the model's, not the machine's (as in arXiv 2204.02311, appendix B).
    """
    linears = {name: module for name, module in draft.named_modules() if isinstance(module, nn.Linear)}
    weights = {id(linear.weight): (name, linear.weight) for name, linear in linears.items()}
    unrolled = draft.method == "eagle3"
    once, each = 0, 0
    for name, weight in weights.values():
        if unrolled and name == "fc":
            once += 4 * weight.numel()
        else:
            each += (6 if weight.requires_grad else 4) * weight.numel()
    if draft.method == "medusa" and not any("lm_heads." in name for name in linears):
        width = next(linear for name, linear in linears.items() if "blocks." in name).out_features
        each += 4 * draft.steps * draft.draft_vocab_size * width
    return float(once + each * (draft.steps if unrolled else 1))


def peak_flops(device: torch.device) -> float | None:
    """A GPU's dense bf16 peak, FLOP/s, as its data sheet has it; None for a device that is not listed (roofline.py),
    and for CPUs.
    """
    if device.type != "cuda":
        return None
    try:
        return find_device(torch.cuda.get_device_name(device)).flops
    except RooflineError:
        return None


def peak_memory(device: torch.device) -> tuple[float, float]:
    """GiB at most so far: of this process, and of the tensors on its GPU (0 on a CPU)."""
    return process_peak() / GIB, torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0
