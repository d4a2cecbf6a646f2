"""Whether a small model speaks the target's tokens, and rows of its embedding and head added or cut until both have
the same count.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.drafts.base import DraftError
from drafttrain.target import Target

PROBE = (4, 64)
"""Rows and length of the random tokens over which the mean hidden state is taken."""

OTHER_VOCABULARY = (
    "a draft from the target's own family. Engines can also translate between vocabularies, untrained and at lower "
    "acceptance: transformers with generate(assistant_model=.., tokenizer=.., assistant_tokenizer=..), vLLM with "
    '"method": "draft_model", "use_heterogeneous_vocab": true, llama.cpp by itself; SGLang needs the same vocabulary'
)


def token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id that the tokenizer knows, plus one. Rows of a model from there on are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def check_tokenizers(
    draft_tokenizer: PreTrainedTokenizerBase | None, target: Target, draft_vocab_size: int | None = None
) -> None:
    """DraftError, naming the first id that differs, unless every id of the target's tokenizer is the same token here.

    Tokens that only one of them has are allowed behind the other's last one, where the other MODEL has padding rows:
    such an id is never proposed with success, or learned in training like any other. draft_vocab_size: the rows of the
    draft model; None: the draft's tokenizer must have all of the target's tokens. Without a tokenizer on either side
    there is nothing to compare.
    """
    if draft_tokenizer is None or target.tokenizer is None:
        return
    theirs, ours = _by_id(target.tokenizer), _by_id(draft_tokenizer)
    last_theirs, last_ours = max(theirs), max(ours)
    for i in sorted(theirs.keys() | ours.keys()):
        padded = last_ours < i < (draft_vocab_size or 0) or last_theirs < i < target.vocab_size
        if theirs.get(i) == ours.get(i) or padded:
            continue
        raise DraftError(
            f"the draft has another tokenizer than {target.title}: id {i} is {_named(ours, i)} in the draft and "
            f"{_named(theirs, i)} in the target ({len(ours)} and {len(theirs)} tokens). Expected the same token for "
            f"every id. Mend: {OTHER_VOCABULARY}."
        )


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}


def _named(tokens: dict[int, str], i: int) -> str:
    return repr(tokens[i]) if i in tokens else "no token"


@torch.no_grad()
def align_vocabulary(model: PreTrainedModel, vocab_size: int, tokens: int) -> PreTrainedModel:
    """The same model, changed in place: embedding and head (bias too) have vocab_size rows, tied ones stay tied.

    tokens: how many of the rows are real tokens; what lies behind is padding. New rows copy the model's last row where
    that is padding itself, so they are as unlikely as the family made them. Otherwise they copy the row of the word
    with the lowest mean logit over random tokens: on average, then, no added row is likelier than the least likely
    real word. (Rows of zeros would not do: real words often have logits far below 0.) DraftError where real tokens
    would be cut.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = len(embedding.weight)
    if vocab_size < min(tokens, rows):
        raise DraftError(
            f"the draft has {rows} rows for {tokens} tokens, the target {vocab_size} rows. Cutting the draft to that "
            f"would drop real tokens. Expected at most {vocab_size} tokens. Mend: a draft with the target's tokenizer."
        )
    if vocab_size == rows:
        return model
    source = None
    if vocab_size > rows:
        source = rows - 1 if rows > tokens else _least_likely(model)
    tied = head.weight is embedding.weight
    embedding.weight = _resized(embedding.weight, vocab_size, source)
    head.weight = embedding.weight if tied else _resized(head.weight, vocab_size, source)
    if head.bias is not None:
        head.bias = _resized(head.bias, vocab_size, source)
    embedding.num_embeddings = head.out_features = vocab_size
    model.config.get_text_config(decoder=True).vocab_size = vocab_size
    for module in model.modules():
        if vars(module).get("vocab_size") == rows:  # Backbones and heads note it beside the config.
            module.vocab_size = vocab_size
    return model


def _resized(weight: nn.Parameter, count: int, source: int | None) -> nn.Parameter:
    """The first `count` rows; rows beyond the end copy the row `source`."""
    rows = weight.detach()[:count]
    if count > len(weight):
        rows = torch.cat([rows, rows[source].expand(count - len(rows), *rows.shape[1:])])
    return nn.Parameter(rows.clone(), requires_grad=weight.requires_grad)


def _least_likely(model: PreTrainedModel) -> int:
    """The row with the lowest mean logit over random tokens, from the mean hidden state, in which logits are linear."""
    head, states = model.get_output_embeddings(), []
    ids = random_tokens(len(head.weight)).to(head.weight.device)
    handle = head.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    mean = states[0].float().flatten(0, -2).mean(0)
    logits = torch.cat([rows.float() @ mean for rows in head.weight.split(1 << 14)])
    if head.bias is not None:
        logits += head.bias.float()
    return int(logits.argmin())


def random_tokens(vocab_size: int) -> Tensor:
    """The same ids each time, int64 of the shape PROBE, uniform over the vocabulary."""
    return torch.randint(vocab_size, PROBE, generator=torch.Generator().manual_seed(0))
