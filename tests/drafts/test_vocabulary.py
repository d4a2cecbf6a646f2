"""The draft's tokens against the target's, id by id, and rows added to or cut from embedding and head."""

import pytest
import torch

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.vocabulary import align_vocabulary, check_tokenizers, random_tokens, token_count
from tests.tiny_drafts import make_target
from tests.tiny_models import V, make_model, make_tokenizer, tokens

WORDS = 90
TOKENS = WORDS + 5


def check(draft_words=WORDS, target_words=WORDS, rows=None, **draft):
    target = make_target("Llama", make_tokenizer(target_words))
    check_tokenizers(make_tokenizer(draft_words, **draft), target, rows)


def test_the_same_tokens_pass_and_are_counted():
    check()
    assert token_count(make_tokenizer()) == TOKENS


def test_nothing_is_compared_without_a_tokenizer():
    check_tokenizers(None, make_target("Llama", make_tokenizer()))
    check_tokenizers(make_tokenizer(), make_target("Llama"))


def test_the_first_id_that_differs_is_named_with_both_tokens_and_a_way_out():
    with pytest.raises(DraftError, match=r"id 2 is '</s>' in the draft and '<eos>' in the target") as caught:
        check(specials=("<pad>", "<bos>", "</s>", "<|end|>"))
    assert "assistant_tokenizer" in str(caught.value)
    assert "use_heterogeneous_vocab" in str(caught.value)


def test_tokens_missing_in_the_draft_pass_only_where_its_model_has_padding():
    with pytest.raises(DraftError, match="id 93 is no token in the draft and 'w88' in the target"):
        check(draft_words=88)
    with pytest.raises(DraftError, match="id 94 is no token in the draft"):
        check(draft_words=88, rows=94)
    check(draft_words=88, rows=95)


def test_tokens_that_only_the_draft_has_pass_only_in_the_targets_padding():
    check(draft_words=WORDS + 4)
    with pytest.raises(DraftError, match="id 99 is 'w94' in the draft and no token in the target"):
        check(draft_words=WORDS + 5)


FAMILIES = ["Llama", "Qwen3", "Gemma3", "Gemma2", "Cohere2"]


def mean_logits(model):
    """Mean logit of each word over random tokens, softcap and scale included."""
    rows = len(model.get_output_embeddings().weight)
    with torch.no_grad():
        return model(random_tokens(rows) % 90).logits.flatten(0, 1).mean(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_cut_and_the_logits_of_the_rest_stay(family):
    model = make_model(family, vocab_size=128).eval()
    with torch.no_grad():
        expected = model(tokens()).logits[..., :V]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert align_vocabulary(model, V, TOKENS) is model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    assert head.weight.shape[0] == embedding.num_embeddings == head.out_features == model.config.vocab_size == V
    assert torch.allclose(model(tokens()).logits, expected, atol=1e-6)
    assert model.model.vocab_size == V


@pytest.mark.parametrize("family", FAMILIES)
def test_added_rows_copy_the_last_row_of_padding(family):
    model = make_model(family).eval()
    with torch.no_grad():
        before = model(tokens()).logits
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    logits = align_vocabulary(model, 128, TOKENS)(tokens()).logits
    assert torch.allclose(logits[..., :V], before, atol=1e-6)
    assert torch.allclose(logits[..., V:], before[..., -1:].expand(-1, -1, 29), atol=1e-6)
    assert torch.equal(
        model.get_input_embeddings().weight[V:], model.get_input_embeddings().weight[V - 1].expand(29, -1)
    )
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3", "Cohere2"])
def test_rows_added_behind_real_words_are_no_likelier_than_the_least_likely(family):
    model = make_model(family).eval()
    with torch.no_grad():
        before = model(random_tokens(V)).logits.flatten(0, 1).mean(0)
        after = align_vocabulary(model, V + 3, V)(random_tokens(V)).logits.flatten(0, 1).mean(0)
    assert torch.allclose(after[:V], before, atol=1e-5)
    assert torch.allclose(after[V:], before.min().expand(3), atol=1e-4)
    assert before.min() < -0.01  # Rows of zeros would be likelier.


def test_the_bias_grows_and_decides_with_the_rows():
    model = make_model("Llama").eval()
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(V))
    with torch.no_grad():
        head.bias[17] = -1000
    align_vocabulary(model, V + 2, V)
    assert head.bias[-2:].tolist() == [-1000, -1000]
    assert torch.equal(head.weight[-1], head.weight[17])


def test_real_tokens_are_never_cut():
    with pytest.raises(DraftError, match="99 rows for 95 tokens, the target 90 rows"):
        align_vocabulary(make_model("Llama"), 90, TOKENS)


def test_the_same_size_changes_nothing():
    model = make_model("Llama")
    weight = model.get_output_embeddings().weight
    assert align_vocabulary(model, V, V).get_output_embeddings().weight is weight
