"""The interfaces of every draft: a Proposer drafts tokens for the evaluator, a Draft is trained and yields a
Proposer.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from drafttrain.errors import UserError
from drafttrain.nn.fused_losses import StepFigures
from drafttrain.nn.objective import Objective
from drafttrain.nn.sampling import Sampling, Streams, greedy_choice, inverse_cdf, warp
from drafttrain.nn.tree import StaticTree, Tree
from drafttrain.target import Target, TargetError, TargetStep, cache_folder
from drafttrain.target_files import read_json

GATE_NATS = 0.5
TUNED = "target"
"""Folder of a draft's that holds the target tuned together with it."""


class DraftError(UserError):
    """A draft checkpoint that is missing, broken, or does not belong to the target."""


@dataclass
class Proposal:
    """Drafted tokens of one round.

    tokens int64 [B, N] and lengths int64 [B] (drafted tokens of each row, 0..N); parents int64 [B, N] names each
    node's parent node (-1: the last committed token), None for a chain. q fp32 [B, N, Vd]: the distribution each
    token was drawn from, after temperature, top-k and top-p, over the target ids q_ids [Vd]; None: one-hot.
    """

    tokens: Tensor
    lengths: Tensor
    parents: Tensor | None = None
    q: Tensor | None = None
    q_ids: Tensor | None = None


Stop = Callable[[Tensor], Tensor]
"""Draft logits [B, Vd] -> bool [B]: rows that draft no further. It never sees the token drawn, so it cannot bias it."""


class Proposer(ABC):
    """Drafts tokens for a batch of requests. The evaluator knows drafts only through these calls."""

    feature_layers: Sequence[int] = ()
    """The hs[k] it reads from each TargetStep, ascending."""
    tree: Tree | None = None
    """The kind of tree it proposes; None: chains."""
    max_k: int | None = None
    """How deep it can draft; None: as deep as asked."""

    def reserve(self, batch: int, room: int, k: int) -> None:  # noqa: B027
        """Before `begin`: make ready, untimed, for captured steps (nn/graphs.py) over so many rows, committed tokens
        and drafts. Holds for the next `begin`. Proposers without such steps do nothing."""

    @abstractmethod
    def begin(self, step: TargetStep, next_token: Tensor, sampling: Sampling, streams: Streams) -> None:
        """Start on prefilled prompts: `step` holds them, next_token [B] is the token the target chose after them."""

    @abstractmethod
    def propose(self, k: Tensor, stop: Stop | None = None) -> Proposal:
        """Draft up to k[b] tokens for row b (int64 [B], 0 allowed) that follow the last committed token; trees: up to
        that depth. stop: asked before a token is drawn, with the draft's logits; proposers without logits ignore it."""

    @abstractmethod
    def advance(self, step: TargetStep, path: Tensor, next_token: Tensor) -> None:
        """After verification: path int64 [B, D] lists the accepted nodes of the proposal from the root down, -1 padded;
        next_token [B] follows them. Column 0 of `step` is the last committed token, column i + 1 node i."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""


def draft_chain(
    k: Tensor,
    stop: Stop | None,
    logits_after: Callable[[int, Tensor | None], Tensor],
    ids: Tensor,
    sampling: Sampling,
    streams: Streams,
) -> Proposal:
    """Draft a chain token by token: up to k[b] tokens for row b, over the target ids `ids` [Vd].

    logits_after(i, last): the draft's logits [B, Vd] for draft i, given the one before, int64 [B] on the CPU; None for
    the first. It is not called for drafts that no row asks for.
    """
    K = int(k.max())
    draws = sampling.draws_drafts
    uniforms = streams.uniforms(k.tolist(), K) if draws else None
    tokens, distributions, lengths = [], [], k if stop is None else torch.zeros_like(k)
    for i in range(K):
        logits = logits_after(i, tokens[-1] if i else None)
        if stop is not None:
            going = (lengths == i) & (k > i) & ~stop(logits).cpu()
            if not going.any():
                break
            lengths = lengths + going
        if draws:
            distributions.append(warp(logits, sampling))
            choice = inverse_cdf(distributions[-1], uniforms[:, i].to(logits.device))
        else:
            choice = greedy_choice(logits)
        tokens.append(ids[choice].cpu())
    if not tokens:
        return Proposal(torch.zeros(len(k), 0, dtype=torch.long), torch.zeros_like(k))
    q = torch.stack(distributions, 1) if draws else None
    return Proposal(torch.stack(tokens, 1), lengths, None, q, ids if draws else None)


@dataclass
class Batch:
    """A right-padded training batch. labels[b, p] = x[p+2] where row p is trained at step 0, -100 elsewhere.

    input_ids int64 [B, T], loss_mask bool [B, T] (1: the target produces this token), lengths int64 [B]; attached by a
    FeatureSource: features [B, T, A*Ht] (ascending layers), last_hidden [B, T, Ht] (un-normed hs[n]), target_lse fp32
    [B, T], target_argmax int64 [B, T], topk_ids int64 and topk_log_p fp32 [B, T, k] (the target's likeliest tokens
    after each position and their full-vocabulary log-probabilities, falling). Which of them are attached, the others
    staying None, depends on the source.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    labels: Tensor
    index: Tensor
    features: Tensor | None = None
    last_hidden: Tensor | None = None
    target_lse: Tensor | None = None
    target_argmax: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_log_p: Tensor | None = None


class DraftLoss(NamedTuple):
    """What a draft's forward returns: the weighted objective as a SUM over rows, and detached sums for each step.

    A tuple, because FSDP2 and ZeRO-3 look for tensors to hang their backward on in tuples, lists and dicts alone.
    """

    objective: Tensor
    figures: StepFigures


@dataclass
class ParameterGroup:
    """Parameters that learn at `scale` times the learning rate, from optimizer step `first_step` (0, 1, ..) on, with a
    warm-up of their own.
    """

    parameters: list[Tensor]
    scale: float = 1.0
    first_step: int = 0


class Draft(nn.Module, ABC):
    """A trainable draft. Calling it IS the loss; the frozen target's tensors it uses are plain attributes, not
    state.
    """

    method: ClassVar[str]
    feature_layers: list[int]
    draft_vocab_size: int
    objective: Objective
    """What a row's loss is; training sets it."""
    max_k: int | None = None
    """How deep it can draft; None: as deep as asked."""
    tree: StaticTree | None = None
    """The fixed tree that was calibrated for it, measured beside its chains."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many steps the figures of `forward` have."""

    @property
    def start_limit(self) -> float:
        """A start-up loss (`calibrate`) above so many nats says that something does not fit: half a nat more than
        guessing.
        """
        return math.log(self.draft_vocab_size) + GATE_NATS

    def parameter_groups(self) -> list[ParameterGroup]:
        """Those that do not learn at the recipe's learning rate, or not from the first step on."""
        return []

    def trained_state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the state but for frozen weights that belong to the target."""
        return self.state_dict()

    def load_trained_state(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `trained_state`."""
        self.load_state_dict(tensors)

    @abstractmethod
    def forward(self, batch: Batch) -> DraftLoss:
        """The objective of one batch, under the module that owns the weights."""

    @abstractmethod
    def attach(self, target: Target) -> Self:
        """Take the frozen tensors it reads (embeddings, teacher's head rows) from the target; returns itself."""

    @abstractmethod
    def calibrate(self, batch: Batch) -> float:
        """Set what can be set on one batch before training; returns the step-0 loss in nats a row."""

    def served_by(self, target: Target) -> Target:
        """The model that verifies its drafts: the target, unless the draft has tuned it (Medusa-2)."""
        return target

    @abstractmethod
    def proposer(self, target: Target, tree: Tree | None = None) -> Proposer:
        """A proposer that drafts for this target with this module's weights: chains, or trees of the given kind."""

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Write config and weights (fp32 masters included) into an existing folder."""


def supervised_rows(loss_mask: Tensor, steps: int) -> Tensor:
    """Which rows count at each unroll step: bool [steps, B, T] from loss_mask bool [B, T].

    Row p counts at step k iff x[p+1] .. x[p+2+k] are all supervised, so the first row used in serving (the last
    prompt position) is trained and nothing past the turn's end is.
    """
    T = loss_mask.shape[1]
    running = loss_mask.roll(-1, 1)
    out = []
    for k in range(steps):
        running = running & loss_mask.roll(-2 - k, 1)
        inside = torch.arange(T, device=loss_mask.device) < T - 2 - k  # What a roll carried around the end is cut off.
        out.append(running & inside)
    return torch.stack(out)


def draft_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """The place of each target id in a draft vocabulary: int64 [V] from draft_ids [Vd], -1 outside."""
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 hex of the vocabulary: equal exactly when every token has the same id."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 hex of the chat template, whatever form it has; of no template one value too."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def quantization_of(target: Target) -> str:
    """How the target's weights were quantised: GGUF (read as dense ones), the config's method, or none."""
    if target.folder is not None and target.folder.parent == cache_folder() / "gguf":
        return "GGUF"
    settings = target.model.config.to_dict().get("quantization_config") or {}
    return str(settings.get("quant_method") or ("unnamed" if settings else "none"))


def write_provenance(folder: Path, target: Target, **details: Any) -> None:
    """drafttrain.json beside a draft's config: which target, template and tokenizer it was made for."""
    facts = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "target_quantization": quantization_of(target),
        "target_template_sha256": None if target.tokenizer is None else template_hash(target.tokenizer),
        "tokenizer_sha256": None if target.tokenizer is None else tokenizer_hash(target.tokenizer),
        **details,
    }
    (folder / "drafttrain.json").write_text(json.dumps(facts, indent=2) + "\n")


def read_facts(path: Path) -> dict[str, Any]:
    """A JSON object of a draft's folder; DraftError where it is broken."""
    try:
        return read_json(path, "export the draft again")
    except TargetError as error:
        raise DraftError(str(error)) from error


def tuned_target(folder: Path) -> Path | None:
    """The target that was tuned together with the draft in a folder (Medusa-2), where one lies beside it."""
    path = folder / TUNED
    return path if (path / "config.json").exists() else None


def tuned_facts(folder: Path) -> dict[str, Any]:
    """Of a draft whose target was tuned with it: tuned_from (the unchanged target's name), and drift (nats) and
    same_choice on its validation data where there was some; empty for other drafts.
    """
    path = folder / "drafttrain.json"
    facts = read_facts(path) if path.exists() else {}
    if "tuned_from" not in facts:
        return {}
    names = {"drift": "eval_target_drift", "same_choice": "eval_target_same_choice"}
    validation = facts.get("validation", {})
    found = {short: validation[name] for short, name in names.items() if name in validation}
    return {"tuned_from": facts["tuned_from"]["name"], **found}


def tuned_words(folder: Path) -> str:
    """Which target a draft has to be served with that was tuned together with it; empty for other drafts."""
    facts = tuned_facts(folder)
    if not facts:
        return ""
    drift = ""
    if "drift" in facts:
        drift = f"; on validation data {facts['drift']:.4f} nats from it, same choice at {facts['same_choice']:.1%}"
    return f"served with {tuned_target(folder) or 'its tuned target'} ({facts['tuned_from']}, tuned with it{drift})"


def check_provenance(folder: Path, target: Target) -> None:
    """DraftError when the folder says that it was made for another tokenizer, or with a tuned target (Medusa-2) that is
    not this one. Drafts from elsewhere say nothing and pass.
    """
    path = folder / "drafttrain.json"
    if not path.exists():
        return
    made_for = read_facts(path)
    unchanged = made_for.get("tuned_from")
    if unchanged and made_for.get("target_fingerprint") != target.fingerprint:
        who = f"the unchanged {target.name}" if unchanged["fingerprint"] == target.fingerprint else target.name
        raise DraftError(
            f"{folder}: these heads were trained together with a tuned {unchanged['name']}, found {who}. Expected that "
            f"very tuned model, whose states they read. Mend: --target {tuned_target(folder) or 'RUN/draft/target'}"
        )
    expected = made_for.get("tokenizer_sha256")
    if expected and target.tokenizer is not None and expected != tokenizer_hash(target.tokenizer):
        raise DraftError(
            f"{folder}: this draft was trained for {made_for.get('target')} with another tokenizer than "
            f"{target.name}'s. "
            "Expected the same vocabulary, id by id. Mend: give the target it was trained for, or train a draft for "
            "this one."
        )
