"""EAGLE-3 drafts for tiny targets, batches with the target's features, and proposers of known outcome."""

import torch

from drafttrain.drafts.base import Batch, Proposal, Proposer
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import greedy_choice, inverse_cdf, warp
from drafttrain.recipe import DraftConfig
from drafttrain.specdec.decode import generate
from drafttrain.target import Target
from tests.tiny_models import V, make_model

LAYERS = [1, 4, 6]
LONG = {"max_position_embeddings": 256}


def make_target(family="Llama", tokenizer=None, **changes) -> Target:
    return Target.from_model(make_model(family, **LONG | changes), tokenizer, name=f"tiny {family}")


def make_draft(target, ids=None, layers=None, seed=0, **choices) -> Eagle3Draft:
    """A random draft with norms, feature scales and weights far from one and zero."""
    torch.manual_seed(seed)
    ids = torch.arange(V) if ids is None else ids
    config = Eagle3Config.for_target(target, DraftConfig(**choices), layers or LAYERS, len(ids))
    draft = Eagle3Draft(config, ids).attach(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
        draft.feature_rms.uniform_(0.5, 2)
    return draft


def agreeable_draft(target):
    """A draft that is accepted now and then: the target's own head on its last features."""
    draft = make_draft(target, layers=[1, 4, 8])
    return draft.initialise(torch.ones(draft.fc.in_features), target.final_norm.weight)


def plain(target, prompts, count, **options) -> list[list[int]]:
    return [g.tokens for g in generate(target, prompts, max_new_tokens=count, stop_ids=(), **options).generations]


def features_of(target, input_ids, layers=LAYERS) -> torch.Tensor:
    states = target.hidden_states(input_ids, None, layers)
    return torch.cat([states[k] for k in layers], -1)


def make_batch(target, input_ids, loss_mask, layers=LAYERS) -> Batch:
    """The batch a feature source would hand over, every row full length."""
    last = target.hidden_states(input_ids, None, [target.num_layers])[target.num_layers]
    logits = target.head()(last).float()
    lengths = torch.full((len(input_ids),), input_ids.shape[1])
    return Batch(
        input_ids,
        loss_mask,
        lengths,
        labels=torch.full_like(input_ids, -100),
        index=torch.arange(len(input_ids)),
        features=features_of(target, input_ids, layers),
        last_hidden=last,
        target_lse=logits.logsumexp(-1),
        target_argmax=logits.argmax(-1),
    )


def train(draft, batch, updates: int) -> list[float]:
    """A few plain Adam updates on one batch; the losses a row at step 0."""
    optimizer = torch.optim.Adam(draft.parameters(), lr=0.01)
    losses = []
    for _ in range(updates):
        loss = draft(batch)
        optimizer.zero_grad()
        (loss.objective / loss.figures.rows[0]).backward()
        optimizer.step()
        losses.append(float(loss.figures.loss[0] / loss.figures.rows[0]))
    draft.requires_grad_(False)
    return losses


class Oracle(Proposer):
    """Drafts the known continuations `texts` (one a row), right for the first `right` drafts of a round only.

    `right` may list one number a round, the last holds on."""

    def __init__(self, texts, right):
        self.texts, self.right = [list(text) for text in texts], right
        self.at: list[int] = []
        self.rounds: list[int] = []

    def begin(self, step, next_token, sampling, streams):
        self.at, self.rounds = [1] * len(next_token), [0] * len(next_token)

    def propose(self, k, stop=None):
        tokens = torch.zeros(len(k), int(k.max()), dtype=torch.long)
        for row, limit in enumerate(k.tolist()):
            at, number = self.at[row], self.rounds[row]
            right = self.right if isinstance(self.right, int) else self.right[min(number, len(self.right) - 1)]
            for i, token in enumerate(self.texts[row][at : at + limit]):
                tokens[row, i] = token if i < right else (token + 1) % V
            self.rounds[row] += 1
        return Proposal(tokens, k)

    def advance(self, step, path, next_token):
        for row, count in enumerate((path >= 0).sum(1).tolist()):
            self.at[row] += count + 1

    def keep(self, rows):
        self.texts = [self.texts[row] for row in rows]
        self.at = [self.at[row] for row in rows]
        self.rounds = [self.rounds[row] for row in rows]


class SelfProposer(Proposer):
    """The target as its own draft, with a cache of its own: q is p."""

    def __init__(self, target):
        self.target = target

    def begin(self, step, next_token, sampling, streams):
        self.sampling, self.streams = sampling, streams
        self.cache = RaggedCache(len(next_token))
        self.target.step(step.tokens, self.cache, step.lengths)
        self.cache.lengths = step.lengths.clone()
        self.last = next_token

    def propose(self, k, stop=None):
        width, committed = int(k.max()), self.cache.lengths
        draws = self.sampling.draws_drafts
        uniforms = self.streams.uniforms(k.tolist(), width)
        tokens, distributions = [self.last], []
        for i in range(width):
            logits = self.target.step(tokens[-1][:, None], self.cache).logits[:, 0]
            self.cache.lengths = self.cache.lengths + 1
            distributions.append(warp(logits, self.sampling))
            tokens.append(inverse_cdf(distributions[-1], uniforms[:, i]) if draws else greedy_choice(logits))
        # The last draft's own entry is missing: the round may accept it.
        self.target.step(tokens[-1][:, None], self.cache)
        self.cache.lengths = committed
        q = torch.stack(distributions, 1) if draws else None
        return Proposal(torch.stack(tokens[1:], 1), k, None, q, torch.arange(V) if draws else None)

    def advance(self, step, path, next_token):
        self.cache.lengths = self.cache.lengths + (path >= 0).sum(1) + 1
        self.last = next_token

    def keep(self, rows):
        self.cache.keep(rows)
        self.last = self.last[rows]
