"""Coverage by size and domain against counts by hand and against build_draft_vocab and a loop over windows."""

import random

import pytest
import torch

from drafttrain.data import coverage as module
from drafttrain.data.conversations import load_conversations
from drafttrain.data.coverage import ALL, OTHERS, coverage_lines, coverage_table
from drafttrain.data.prepare import load_prepared, prepare
from drafttrain.data.vocab import DraftVocab, build_draft_vocab, coverage
from drafttrain.recipe import DataEntry, parse_recipe
from tests.training.tiny_run import make_target, open_run, prompt_rows, settings, write_rows

WORDS = 40


def row(ids, mask, domain="") -> dict:
    return {"input_ids": ids, "loss_mask": mask, "domain": domain}


def pairs(rows) -> list:
    return [(one["input_ids"], one["loss_mask"]) for one in rows]


@pytest.fixture
def small_sizes(monkeypatch) -> None:
    monkeypatch.setattr(module, "SIZES", (2, 3, 8, 64))


def test_by_hand(small_sizes) -> None:
    # Supervised in training: 5 three times, 6 twice, 7 once. With 1 kept, a vocabulary of 2 is {1, 5}, of 3 {1, 5, 6}.
    train = [row([9, 5, 6, 5, 7], [0, 1, 1, 1, 1], "a"), row([5, 6, 4], [1, 1, 0], "b")]
    table = coverage_table(DraftVocab(torch.tensor([1, 6, 7]), 0.0, 3), {"train": train}, 10, [1])
    assert (table["sizes"], table["chosen"], table["depth"]) == ([2, 3, 8, 10], 3, 4)
    found = table["splits"]["train"]
    assert list(found) == [ALL, "a", "b"] and [one["tokens"] for one in found.values()] == [6, 4, 2]
    assert found[ALL]["coverage"] == pytest.approx([3 / 6, 5 / 6, 1, 1])
    assert found["a"]["coverage"] == pytest.approx([2 / 4, 3 / 4, 1, 1])
    assert found["b"]["coverage"] == pytest.approx([1 / 2, 1, 1, 1])
    assert [one["chosen_coverage"] for one in found.values()] == pytest.approx([3 / 6, 2 / 4, 1 / 2])
    # Windows of 2: 56 65 57 of a, 56 of b; of 3: 565 657; of 4: 5657.
    assert found[ALL]["length"] == pytest.approx([1.5, 1 + 5 / 6 + 3 / 4 + 1 / 2 + 0, 5, 5])
    assert found["b"]["length"] == pytest.approx([1.5, 3, 3, 3])


def test_against_build_draft_vocab_and_a_loop(small_sizes, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 50)
    rng = random.Random(0)
    rows = {"train": [], "validation": []}
    for split, count in (("train", 30), ("validation", 9)):
        for i in range(count):
            ids = [int(rng.expovariate(0.15)) % WORDS for _ in range(rng.randrange(2, 20))]
            rows[split].append(row(ids, [rng.randrange(4) > 0 for _ in ids], f"d{i % 3}"))
    chosen = build_draft_vocab(pairs(rows["train"]), WORDS, 11, [0, 39])
    table = coverage_table(chosen, rows, WORDS, [0, 39])
    assert table["sizes"] == [2, 3, 8, WORDS]
    for split, domains in table["splits"].items():
        for name, found in domains.items():
            of = [one for one in rows[split] if name in (ALL, one["domain"])]
            vocabs = [build_draft_vocab(pairs(rows["train"]), WORDS, size, [0, 39]) for size in table["sizes"]]
            shares = [*found["coverage"], found["chosen_coverage"]]
            lengths = [*found["length"], found["chosen_length"]]
            for vocab, share, length in zip([*vocabs, chosen], shares, lengths, strict=True):
                assert share == pytest.approx(coverage(vocab, pairs(of)))
                assert length == pytest.approx(1 + sum(windows(of, set(vocab.ids.tolist()), k) for k in range(1, 5)))


def windows(rows, held: set, k: int) -> float:
    found = [
        set(one["input_ids"][i : i + k]) <= held
        for one in rows
        for i in range(len(one["input_ids"]) - k + 1)
        if all(one["loss_mask"][i : i + k])
    ]
    return sum(found) / max(len(found), 1)


def test_small_domains_are_put_together(small_sizes, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_DOMAINS", 2)
    rows = [row([5] * (i + 1), [1] * (i + 1), f"d{i}") for i in range(5)]
    found = coverage_table(DraftVocab(torch.tensor([5]), 1.0, 1), {"train": rows}, 10, [])["splits"]["train"]
    assert {name: one["tokens"] for name, one in found.items()} == {ALL: 15, "d4": 5, "d3": 4, OTHERS: 6}


def test_the_lines(small_sizes) -> None:
    train = [row([9, 5, 6, 5, 7], [0, 1, 1, 1, 1], "code"), row([5, 6, 4], [1, 1, 0], "b")]
    lines = coverage_lines(coverage_table(DraftVocab(torch.tensor([1, 6, 7]), 0.0, 3), {"train": train}, 2048, [1]))
    assert "acceptance length at K = 4" in lines[0]
    assert lines[1].split() == ["tokens", "2", "3", "8", "64", "whole", "this", "(3)"]
    assert lines[2].split()[:4] == ["train", "6", "50.0%", "(1.50)"] and lines[3].split()[:2] == ["code", "4"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_default_sizes_are_1k_to_128k() -> None:
    table = coverage_table(DraftVocab(torch.tensor([5]), 1.0, 1), {"train": [row([5], [1])]}, 200_000, [])
    assert table["sizes"] == [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 200_000]


def test_domains_are_categories_or_the_entries_names(tmp_path) -> None:
    write_rows(
        tmp_path / "mine.jsonl", [{"text": "w1", "category": "code"}, {"text": "w2"}, {"text": "w3", "category": 3}]
    )
    path = str(tmp_path / "mine.jsonl")
    found = load_conversations([DataEntry(path=path), DataEntry(path=path, name="chat")], 0)
    assert [one.domain for one in found] == ["code", "mine", "mine", "code", "chat", "chat"]


def test_prepare_prints_it_and_keeps_it_in_the_manifest(tmp_path) -> None:
    values = settings(tmp_path)
    write_rows(tmp_path / "more.jsonl", [{**one, "completion": " w3"} for one in prompt_rows(3, 1)])
    values["data"]["train"] += [{"path": str(tmp_path / "more.jsonl")}]
    recipe = parse_recipe(values, tmp_path)
    target, run, said = make_target(recipe), open_run(tmp_path / "run", recipe), []
    prepared = prepare(recipe, run, target, said.append)
    table = prepared.manifest["vocabulary"]
    assert list(table["splits"]["train"]) == [ALL, "train", "more"] and list(table["splits"]["validation"]) == [ALL]
    assert table["splits"]["train"]["more"]["tokens"] == 6  # "w3" and a stop for each
    for split in ("train", "validation"):
        chosen = table["splits"][split][ALL]["chosen_coverage"]
        assert chosen == pytest.approx(prepared.manifest["coverage"][split])
    assert [line for line in coverage_lines(table) if line in said] == coverage_lines(table)
    assert load_prepared(recipe, run, target).manifest == prepared.manifest
