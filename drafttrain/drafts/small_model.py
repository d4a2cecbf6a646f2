"""A small causal language model of the same vocabulary as the draft (arXiv 2211.17192), and making one from layers of
the target.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.drafts.base import DraftError, Proposal, Proposer, Stop, draft_chain
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling, Streams
from drafttrain.target import Target, TargetStep, find_decoder

PER_LAYER = ("layer_types", "mlp_layer_types")
"""Entries of a config that hold one value for each layer and are read in the forward."""


class SmallModelProposer(Proposer):
    """Drafts with a whole model, loaded like a target (`load_target`), behind a KV cache of its own.

    A round of K drafts takes K forwards: the tokens committed since the last one run together and yield the first
    draft, also the last accepted draft, whose entry is missing when all stood. The head runs on one token a row.
    ids int64 [Vd], rising: a draft vocabulary, so that the head has only these rows and drafts are only these tokens.
    A row that outgrows the small model's positions is drafted no further.
    """

    def __init__(self, model: Target, ids: Tensor | None = None):
        rows = len(model.lm_head_weight)
        if ids is None:
            ids = torch.arange(rows)
        elif not len(ids) or ids[0] < 0 or ids[-1] >= rows or not bool((ids.diff() > 0).all()):
            raise DraftError(
                f"the draft vocabulary for {model.title} has {len(ids)} ids. Expected at least one, strictly rising, "
                f"within 0..{rows - 1}. Mend: sort them and drop what is double or outside."
            )
        self.model = model if len(ids) == rows else with_head_rows(model, ids)
        self._ids = ids.to(model.device)
        self._rows = rows

    def begin(self, step: TargetStep, next_token: Tensor, sampling: Sampling, streams: Streams) -> None:
        """As in Proposer; DraftError when the target has another vocabulary."""
        if step.logits.shape[-1] != self._rows:
            raise DraftError(
                f"the small model {self.model.title} has a vocabulary of {self._rows}, the target one of "
                f"{step.logits.shape[-1]}. Expected the same tokens under the same ids. Mend: a small model of the "
                "target's own family and generation."
            )
        self._sampling, self._streams = sampling, streams
        self._cache = RaggedCache(len(next_token), capacity=step.tokens.shape[1] + 128)
        self._outgrown = torch.zeros(len(next_token), dtype=torch.bool)
        rows = zip(step.tokens.tolist(), step.lengths.tolist(), next_token.tolist(), strict=True)
        self._pending = [[*tokens[:length], token] for tokens, length, token in rows]
        self._written = 0
        self._logits = self._run_pending()

    def _run_pending(self) -> Tensor | None:
        """Commit all pending tokens; the logits [B, Vd] behind them, None when every row has outgrown the model."""
        lengths = torch.tensor([len(tokens) for tokens in self._pending])
        self._outgrown |= self._cache.lengths + lengths > self.model.max_positions
        if self._outgrown.any():
            # Such a row goes on as ballast, from position 0, so that it cannot run out of positions again.
            self._cache.lengths = self._cache.lengths.masked_fill(self._outgrown, 0)
            lengths = lengths.masked_fill(self._outgrown, 1)
        tokens = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long)
        for row, length in enumerate(lengths.tolist()):
            tokens[row, :length] = torch.tensor(self._pending[row][-length:])
        self._pending = [[] for _ in self._pending]
        if self._outgrown.all():
            return None
        logits = self.model.step(tokens, self._cache, lengths, last_only=True).logits[:, 0]
        self._cache.lengths = self._cache.lengths + lengths
        return logits

    @torch.no_grad()
    def propose(self, k: Tensor, stop: Stop | None = None) -> Proposal:
        self._written = 0
        if self._logits is None and bool(((k > 0) & ~self._outgrown).any()):
            self._logits = self._run_pending()
        committed = self._cache.lengths
        # The last draft is never run, so it needs no position of its own.
        k = torch.minimum(k, self.model.max_positions - committed + 1).masked_fill(self._outgrown, 0)

        def logits_after(i: int, last: Tensor | None) -> Tensor:
            if last is None:
                return self._logits
            self._cache.lengths = (committed + i - 1).clamp_max(self.model.max_positions - 1)
            logits = self.model.step(last[:, None], self._cache, last_only=True).logits[:, 0]
            self._written = i
            return logits

        drafted = draft_chain(k, stop, logits_after, self._ids, self._sampling, self._streams)
        self._cache.lengths = committed
        return drafted

    def advance(self, step: TargetStep, path: Tensor, next_token: Tensor) -> None:
        accepted = (path >= 0).sum(1)
        # The entries of the first `written` drafts are there already: committing them is raising the length.
        present = accepted.clamp_max(self._written).masked_fill(self._outgrown, 0)
        self._cache.lengths = self._cache.lengths + present
        rows = zip(step.tokens.tolist(), present.tolist(), accepted.tolist(), next_token.tolist(), strict=True)
        for pending, (tokens, first, last, token) in zip(self._pending, rows, strict=True):
            pending.extend([*tokens[1 + first : 1 + last], token])
        self._logits = None

    def keep(self, rows: Sequence[int]) -> None:
        index = torch.as_tensor(rows, dtype=torch.long)
        self._cache.keep(rows)
        self._outgrown = self._outgrown[index]
        self._pending = [self._pending[row] for row in rows]
        if self._logits is not None:
            self._logits = self._logits[index.to(self._logits.device)]


def with_head_rows(model: Target, ids: Tensor) -> Target:
    """The same model with a head of the rows ids [Vd] alone (a copy of them): logits [.., Vd]. All else is shared."""
    small = sharing_copy(model.model)
    old = small.get_output_embeddings()
    head = nn.Linear(old.in_features, len(ids), bias=old.bias is not None, device="meta")
    head.weight = nn.Parameter(old.weight[ids.to(old.weight.device)], requires_grad=False)
    if old.bias is not None:
        head.bias = nn.Parameter(old.bias[ids.to(old.bias.device)], requires_grad=False)
    small.set_output_embeddings(head)
    return Target.from_model(small, model.tokenizer, f"{model.name}, {len(ids)} head rows")


def prune_layers(model: Target, keep: Sequence[int]) -> Target:
    """The model with only the decoder layers `keep` (0-based, rising), the rest left out; the weights are shared.

    A cheap draft that needs no training, for measurements. DraftError for other layers than the model has.
    """
    layers = list(keep)
    if not layers or sorted(set(layers)) != layers or layers[0] < 0 or layers[-1] >= model.num_layers:
        raise DraftError(
            f"the layers to keep are {layers}. Expected rising distinct numbers within 0..{model.num_layers - 1}, one "
            f"at least: the layers of {model.title}, counted from 0."
        )
    small = sharing_copy(model.model)
    config = small.config.get_text_config(decoder=True)
    decoder, _ = find_decoder(small)
    decoder.layers = nn.ModuleList(decoder.layers[i] for i in layers)
    for new, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if "layer_idx" in vars(module):  # Where the layer writes in the cache.
                module.layer_idx = new
    config.num_hidden_layers = len(layers)
    for name in PER_LAYER:
        values = config.to_dict().get(name)
        if values is not None:
            setattr(config, name, [values[i] for i in layers])
    return Target.from_model(small, model.tokenizer, f"{model.name}, {len(layers)} layers")


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of modules and config around the very same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
