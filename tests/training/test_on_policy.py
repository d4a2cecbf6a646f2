"""Batches that the draft continues itself: what is replaced, where rows are cut, what is written, what stays as it
was.
"""

import copy
import random
from collections import Counter

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from drafttrain.data.batching import TokenBudgetSampler, collate
from drafttrain.recipe import OnPolicyConfig
from drafttrain.target import Target
from drafttrain.training.on_policy import OnPolicy, cut
from tests.tiny_models import V, make_model

POSITIONS = 64


class Student(nn.Module):
    """A draft around a tiny model: `small_target` copies the weights, as they are at that moment."""

    def __init__(self, **changes):
        super().__init__()
        self.model = make_model("Llama", num_hidden_layers=2, **changes)
        self.calls = 0

    def small_target(self) -> Target:
        self.calls += 1
        return Target.from_model(copy.deepcopy(self.model))


@pytest.fixture(scope="module")
def student() -> Student:
    return Student()


def policy(stop_ids=(), seed: int = 7, positions: int = POSITIONS, **settings) -> OnPolicy:
    return OnPolicy(OnPolicyConfig(**{"share": 1.0, "max_new_tokens": 6} | settings), seed, stop_ids, positions)


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, V) for _ in range(count)]


def row(*stretches: int, index: int = 0, seed: int = 0) -> dict:
    """A row of stretches of these lengths, by turns not supervised and supervised."""
    mask = [turn % 2 for turn, count in enumerate(stretches) for _ in range(count)]
    return {"index": index, "input_ids": ids(len(mask), seed), "loss_mask": mask}


def chat(prompts=(3, 5, 9), answer: int = 10) -> dict:
    return collate([row(length, answer, index=i, seed=i) for i, length in enumerate(prompts)])


def text(length: int, rows: int = 1, bos: int = 1) -> dict:
    return collate([row(bos, length - bos, index=i, seed=i) for i in range(rows)])


def parts(batch: dict) -> list[tuple[list[int], list[int]]]:
    """Each row as (prompt, continuation), the continuation being what is supervised."""
    out = []
    for tokens, mask, length in zip(batch["input_ids"], batch["loss_mask"], batch["lengths"].tolist(), strict=True):
        start = int(mask.int().argmax())
        assert mask.tolist() == [start <= i < length for i in range(len(mask))]
        out.append((tokens[:start].tolist(), tokens[start:length].tolist()))
    return out


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The model's own likeliest continuation, every token by a forward over the whole row."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model.eval()(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Which batches are replaced.


def test_the_share_is_kept_and_every_other_batch_is_the_very_object(student) -> None:
    batches = [text(8) for _ in range(4)]
    on_policy = policy(share=0.3, max_new_tokens=2)
    replaced = [
        [new is not old for new, old in zip(on_policy.replace(batches, student, 0.5, step), batches, strict=True)]
        for step in range(200)
    ]
    share = np.mean(replaced)
    assert abs(share - 0.3) < 3 * (0.3 * 0.7 / 800) ** 0.5
    by_place = np.mean(replaced, 0)
    assert np.abs(by_place - 0.3).max() < 4 * (0.3 * 0.7 / 200) ** 0.5
    both = np.mean([first and second for first, second, *_ in replaced])  # One draw is no other's.
    assert abs(both - 0.09) < 4 * (0.09 * 0.91 / 200) ** 0.5


def test_decisions_and_text_are_those_of_the_seed_step_and_place_alone(student) -> None:
    batches = [chat() for _ in range(16)]

    def decided(rank: int = 0, step: int = 3, seed: int = 7) -> list[dict]:
        return policy(seed=seed, share=0.5).replace(batches, student, 0.0, step, rank, 2)

    first = decided()
    kept = [new is old for new, old in zip(first, batches, strict=True)]
    assert 0 < sum(kept) < 16
    assert all(same(a, b) for a, b in zip(first, decided(), strict=True))
    # The first of two accumulated batches is decided as if it were alone.
    assert same(policy(share=0.5).replace(batches[:1], student, 0.0, 3)[0], first[0])
    # Two processes decide as one would that has the batches of both in turn.
    alone = policy(share=0.5).replace(batches * 2, student, 0.0, 3)
    assert all(same(a, b) for a, b in zip(alone[::2], first, strict=True))
    assert all(same(a, b) for a, b in zip(alone[1::2], decided(rank=1), strict=True))
    for other in (decided(rank=1), decided(step=4), decided(seed=8)):
        assert kept != [new is old for new, old in zip(other, batches, strict=True)]
    places = [(7, 3, 0), (7, 4, 0), (8, 3, 0), (7, 3, 1)]
    everything = [policy(seed=seed).replace(batches[:2], student, 0.0, s, r, 2) for seed, s, r in places]
    texts = [tuple(tuple(c) for _, c in parts(batch)) for pair in everything for batch in pair]
    assert len(set(texts)) == len(texts) == 8


def test_nothing_is_replaced_before_the_start() -> None:
    student = Student()
    batches = [chat(), chat()]
    on_policy = policy(start=0.4)
    early = on_policy.replace(batches, student, 0.399, 5)
    assert all(new is old for new, old in zip(early, batches, strict=True))
    assert student.calls == 0
    late = on_policy.replace(batches, student, 0.4, 6)
    assert not any(new is old for new, old in zip(late, batches, strict=True))
    assert student.calls == 1  # The weights do not change within a step.


# What is written.


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
def test_a_greedy_continuation_is_the_models_own(student, settings) -> None:
    batch = chat()
    (new,) = policy(**settings).replace([batch], student, 0.0, 0)
    prompts = [batch["input_ids"][i, :length].tolist() for i, length in enumerate((3, 5, 9))]
    assert parts(new) == [(prompt, greedy(student.model, prompt, 6)) for prompt in prompts]
    assert new["index"].tolist() == [-1, -1, -1]
    assert new["lengths"].tolist() == [9, 11, 15]
    # Row p is trained where x[p+1] and x[p+2] are the draft's: five of six tokens, labelled with x[p+2].
    assert (new["labels"] != -100).sum(1).tolist() == [5, 5, 5]
    assert new["labels"][0].tolist() == [-100] * 2 + new["input_ids"][0, 4:9].tolist() + [-100] * 8
    assert {name: tensor.dtype for name, tensor in new.items()} == {n: t.dtype for n, t in batch.items()}


def test_tokens_are_drawn_at_the_temperature(student) -> None:
    batch = collate([row(4, 8, index=i) for i in range(64)])
    on_policy = policy(temperature=0.5, max_new_tokens=2)
    counts = Counter(
        continuation[0]
        for step in range(30)
        for _, continuation in parts(on_policy.replace([batch], student, 0.0, step)[0])
    )
    with torch.no_grad():
        logits = student.model.eval()(input_ids=batch["input_ids"][:1, :4]).logits[0, -1]
    p = (logits / 0.5).softmax(-1)
    total = 30 * 64
    for token in p.topk(6).indices.tolist():
        expected = float(p[token])
        assert abs(counts[token] / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5


def test_the_weights_of_the_moment_write() -> None:
    student = Student()
    batch = chat((5,))
    before = policy(temperature=0.0).replace([batch], student, 0.0, 0)[0]
    with torch.no_grad():
        student.model.lm_head.weight.copy_(student.model.lm_head.weight.roll(1, 0))
    after = policy(temperature=0.0).replace([batch], student, 0.0, 0)[0]
    assert parts(after)[0][1][0] == (parts(before)[0][1][0] + 1) % V


# Stops and room.


def test_a_stop_ends_its_row_and_is_supervised(student) -> None:
    batch = chat()
    free = [continuation for _, continuation in parts(policy(temperature=0.0).replace([batch], student, 0.0, 0)[0])]
    stop = next(t for t in free[0][1:] if t != free[0][0])
    expected = [c[: c.index(stop) + 1] if stop in c else c for c in free]
    (new,) = policy((stop,), temperature=0.0).replace([batch], student, 0.0, 0)
    written = [continuation for _, continuation in parts(new)]
    assert written == [c for c in expected if len(c) > 1]
    assert written[0][-1] == stop
    assert len(written[0]) < 6


def test_rows_that_stop_at_once_are_left_out_and_a_batch_of_them_is_returned_as_it_is(student) -> None:
    batch = chat()
    free = [c for _, c in parts(policy(temperature=0.0).replace([batch], student, 0.0, 0)[0])]
    stops = {free[0][0], free[1][0]} - {free[2][0]}
    assert stops
    (new,) = policy(stops, temperature=0.0).replace([batch], student, 0.0, 0)
    assert len(new["index"]) == sum(c[0] not in stops for c in free) < 3
    assert bool((new["labels"] != -100).any(1).all())
    (new,) = policy({c[0] for c in free}, temperature=0.0).replace([batch], student, 0.0, 0)
    assert new is batch


def test_the_stops_are_those_given_not_the_models_own() -> None:
    student = Student(eos_token_id=2)
    with torch.no_grad():
        student.model.lm_head.weight[2] = 0
        student.model.lm_head.weight[2] += 100 * torch.ones(32)  # Token 2 wins wherever the state's sum is positive.
    (new,) = policy(temperature=0.0).replace([chat((5, 8, 6, 3))], student, 0.0, 0)
    written = [continuation for _, continuation in parts(new)]
    assert any(2 in continuation[:-1] for continuation in written)
    assert {len(continuation) for continuation in written} == {6}


@pytest.mark.parametrize(("ours", "models"), [(12, 64), (64, 12)])
def test_no_row_outgrows_the_positions_of_target_or_draft(ours, models) -> None:
    student = Student(max_position_embeddings=models)
    (new,) = policy(positions=ours).replace([chat((3, 8), answer=2)], student, 0.0, 0)
    assert new["lengths"].tolist() == [3 + 4, 8 + 4]
    # Prompts of 11 and 12 leave no room for two tokens and hold nobody up.
    (new,) = policy(positions=ours).replace([chat((11, 4, 12), answer=8)], student, 0.0, 0)
    assert new["lengths"].tolist() == [4 + 6]
    batch = chat((11, 12), answer=8)
    assert policy(positions=ours).replace([batch], student, 0.0, 0)[0] is batch


def test_a_single_new_token_would_train_nothing_and_is_refused(student) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        policy(max_new_tokens=1)


@pytest.mark.parametrize("answer", [2, 5, 20])
@pytest.mark.parametrize("new", [2, 6, 20])
def test_the_padded_size_stays_within_the_old_one_and_the_new_tokens(student, answer, new) -> None:
    batch = chat((3, 4, 5, 6, 7, 7), answer)
    (made,) = policy(max_new_tokens=new).replace([batch], student, 0.0, 0)
    assert made["input_ids"].numel() <= batch["input_ids"].numel() + new
    assert made["input_ids"].shape[1] <= batch["input_ids"].shape[1] + new
    if answer >= new:
        assert len(made["index"]) == 6
    else:
        size = batch["input_ids"].numel() + new
        assert (len(made["index"]) + 1) * (7 + new) > size  # As many as there is room for.


def test_which_of_too_many_rows_are_continued_is_drawn(student) -> None:
    batch = chat((5,) * 8, answer=2)
    prompts = [tuple(batch["input_ids"][i, :5].tolist()) for i in range(8)]
    counts = Counter()
    for step in range(64):
        chosen = [tuple(p) for p, _ in parts(policy().replace([batch], student, 0.0, step)[0])]
        assert chosen == [p for p in prompts if p in chosen]  # In their old order.
        counts.update(chosen)
    assert len(chosen) == (8 * 7 + 6) // 11 == 5
    assert set(counts) == set(prompts)
    assert max(abs(count - 64 * 5 / 8) for count in counts.values()) < 4 * (64 * 5 / 8 * 3 / 8) ** 0.5


# Where rows are cut.


def test_several_turns_are_cut_at_the_first_token_of_one_of_them(student) -> None:
    batch = collate([row(4, 3, 2, 5, 6, 2)])
    tokens = batch["input_ids"][0].tolist()
    cuts = Counter()
    for step in range(90):
        ((prompt, continuation),) = parts(policy(max_new_tokens=2).replace([batch], student, 0.0, step)[0])
        assert prompt == tokens[: len(prompt)]
        assert len(continuation) == 2
        cuts[len(prompt)] += 1
    assert set(cuts) == {4, 9, 20}
    assert min(cuts.values()) > 15


@pytest.mark.parametrize("bos", [0, 1])
def test_plain_text_is_cut_between_a_quarter_and_three_quarters(student, bos) -> None:
    batch = text(21, bos=bos)
    tokens = batch["input_ids"][0].tolist()
    cuts = Counter()
    for step in range(200):
        ((prompt, _),) = parts(policy(max_new_tokens=2).replace([batch], student, 0.0, step)[0])
        assert prompt == tokens[: len(prompt)]
        cuts[len(prompt)] += 1
    assert set(cuts) == set(range(6, 16))  # 5.25 .. 15.75


@pytest.mark.parametrize(
    ("mask", "places"),
    [
        ([0, 0, 1, 1], {2}),
        ([0, 1], {2}),
        ([1], {1}),
        ([1, 1, 1, 1], {2, 3}),
        ([0, 1, 1, 1, 1, 1, 1, 1], {2, 3, 4, 5, 6}),
        ([1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], {2, 3}),  # Not in the user's words behind the answer.
        ([0, 1, 1, 0, 0, 1, 1, 0], {5}),
        ([1, 0, 1], {2}),
        ([0, 0, 0, 1, 0, 1, 0, 0, 1], {3, 5, 8}),
    ],
)
def test_cut(mask, places) -> None:
    rng = random.Random(0)
    assert {cut(mask, rng) for _ in range(200)} == places


def test_padding_is_no_text(student) -> None:
    batch = collate([row(1, 7), row(1, 29, seed=1)])
    lengths = set()
    for step in range(60):
        new = policy(max_new_tokens=2).replace([batch], student, 0.0, step)[0]
        lengths.add(len(parts(new)[0][0]))
    assert lengths == {2, 3, 4, 5, 6}


def test_rows_without_a_supervised_token_are_left_out(student) -> None:
    silent = {**row(8), "index": 1}
    (new,) = policy().replace([collate([silent, row(4, 4)])], student, 0.0, 0)
    assert new["lengths"].tolist() == [10]
    batch = collate([silent])
    assert policy().replace([batch], student, 0.0, 0)[0] is batch


# What stays as it was.


def test_random_states_training_mode_and_gradients_are_untouched() -> None:
    student = Student(attention_dropout=0.9).train()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    batch = chat()
    before = {name: tensor.clone() for name, tensor in batch.items()}
    weights = {name: p.clone() for name, p in student.named_parameters()}
    (new,) = policy().replace([batch], student, 0.0, 0)
    assert new is not batch
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert all(module.training for module in student.modules())
    assert all(p.requires_grad and p.grad is None for p in student.parameters())
    assert all(torch.equal(p, weights[name]) for name, p in student.named_parameters())
    assert torch.is_grad_enabled()
    assert same(batch, before)


def test_a_whole_epoch_under_a_token_budget_stays_near_it(student) -> None:
    rng = random.Random(3)
    rows = [row(rng.randrange(2, 8), rng.randrange(2, 12), index=i, seed=i) for i in range(60)]
    sampler = TokenBudgetSampler([len(r["input_ids"]) for r in rows], 60)
    batches = [collate([rows[i] for i in indices]) for indices in sampler.batches()]
    made = policy().replace(batches, student, 0.0, 0)
    assert max(batch["input_ids"].numel() for batch in made) <= 60 + 6
    labels = [int((batch["labels"] != -100).sum()) for batch in made]
    assert labels == [sum(len(c) - 1 for _, c in parts(batch)) for batch in made]
    assert min(labels) > 0
