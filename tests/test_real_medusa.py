"""Medusa heads on Gemma 3 270M in fp32: the loop counts what the teacher-forced replay counts, and its text is the
target's own, of chains and trees.
"""

import pytest
import torch

from drafttrain import demo
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.run import load_prompts
from drafttrain.nn.tree import StaticTree
from drafttrain.recipe import DataEntry
from drafttrain.specdec.decode import generate
from tests.drafts.test_medusa_replay import compare, ranked_words, replay
from tests.tiny_drafts import make_batch, train

HEADS, START, COUNT = 3, 32, 40
AFTER = HEADS + 1
CHAIN = [[0] * depth for depth in range(1, HEADS + 1)]
TREE = StaticTree.from_paths([*CHAIN, [1], [2], [0, 1], [1, 0]])


@pytest.fixture(scope="module")
def prompts(gemma) -> list[list[int]]:
    entry = DataEntry(path=str(demo.prompt_folder(gemma) / "test.jsonl"))
    return [list(prompt.ids[:START]) for prompt in load_prompts([entry], gemma, "auto", 4, 0)]


@pytest.fixture(scope="module")
def texts(exact, prompts) -> torch.Tensor:
    """Plain greedy decoding, a few tokens beyond what the loop is asked for."""
    done = generate(exact, prompts, max_new_tokens=COUNT + AFTER, stop_ids=())
    return torch.tensor([p + g.tokens for p, g in zip(prompts, done.generations, strict=True)])


@pytest.fixture(scope="module")
def heads(exact, texts) -> MedusaDraft:
    """Three heads over the words of the texts, trained on the first half of each answer."""
    ids = texts[:, START:].unique()
    config = MedusaConfig(exact.hidden_size, exact.vocab_size, len(ids), HEADS)
    draft = MedusaDraft(config, ids).attach(exact).initialise()
    shown = texts[:, : START + COUNT // 2]
    mask = torch.zeros_like(shown, dtype=torch.bool)
    mask[:, START:] = True
    batch = make_batch(exact, shown, mask)
    draft.calibrate(batch)
    losses = train(draft, batch, 15)
    assert losses[-1] < 0.5 * losses[0]
    return draft


@pytest.fixture(scope="module")
def words(exact, texts, heads) -> torch.Tensor:
    return ranked_words(heads, exact, texts)


def test_chains_accept_what_the_replay_says(exact, prompts, texts, heads, words):
    for k in (1, HEADS):
        done = generate(exact, prompts, heads.proposer(exact), k=k, max_new_tokens=COUNT, stop_ids=())
        assert [g.tokens for g in done.generations] == texts[:, START : START + COUNT].tolist()
        compare(done, replay(words, texts, START, COUNT, StaticTree.from_paths(CHAIN[:k])), k, k)
    assert all(0 < share < 1 for share in done.counts.per_position_acceptance)


def test_a_tree_accepts_what_the_replay_says(exact, prompts, texts, heads, words):
    done = generate(exact, prompts, heads.proposer(exact, TREE), k=HEADS, max_new_tokens=COUNT, stop_ids=())
    assert [g.tokens for g in done.generations] == texts[:, START : START + COUNT].tolist()
    rounds = replay(words, texts, START, COUNT, TREE)
    compare(done, rounds, HEADS, TREE.nodes)
    assert done.counts.accepted > sum(map(sum, replay(words, texts, START, COUNT, StaticTree.from_paths(CHAIN))))


def test_shuffled_biases_part_from_the_replay(exact, prompts, texts, heads, words):
    biases = [block.layers[0].bias for block in heads.blocks]
    kept = [bias.detach().clone() for bias in biases]
    for bias in biases:
        bias.data = bias.data.flip(0) + 1
    done = generate(exact, prompts, heads.proposer(exact), k=HEADS, max_new_tokens=COUNT, stop_ids=())
    for bias, value in zip(biases, kept, strict=True):
        bias.data = value
    assert [g.tokens for g in done.generations] == texts[:, START : START + COUNT].tolist()
    with pytest.raises(AssertionError):
        compare(done, replay(words, texts, START, COUNT, StaticTree.from_paths(CHAIN)), HEADS, HEADS)
