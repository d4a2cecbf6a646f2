"""The engines' settings: batch-size ranges by hand, every key and flag as the engines name them."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.evaluate.engine_settings import (
    SettingsError,
    engine_settings,
    ranges,
    sglang_flags,
    vllm_config,
    write_settings,
)

FALLING = {1: 5, 4: 3, 16: 3, 64: 0}


def test_ranges_meet_at_the_geometric_mean():
    # Borders at sqrt(1 * 4) = 2, sqrt(4 * 16) = 8 (the same K on both sides: merged) and sqrt(16 * 64) = 32.
    assert ranges(FALLING) == [(1, 1, 5), (2, 31, 3), (32, 64, 0)]
    assert ranges({1: 4, 2: 3, 3: 2}) == [(1, 1, 4), (2, 2, 3), (3, 3, 2)]
    assert ranges({8: 3}) == [(1, 8, 3)]


@given(st.dictionaries(st.integers(1, 300), st.integers(0, 7), min_size=1))
def test_ranges_cover_every_batch_size_once_and_keep_what_was_measured(best):
    rows = ranges(best)
    covered = [(size, k) for first, last, k in rows for size in range(first, last + 1)]
    assert [size for size, _ in covered] == list(range(1, max(best) + 1))
    assert best.items() <= dict(covered).items()
    assert all(now[2] != after[2] for now, after in zip(rows, rows[1:], strict=False))


def test_vllm_takes_the_largest_k_and_a_table():
    assert vllm_config("eagle3", "drafts/x", FALLING) == {
        "method": "eagle3",
        "model": "drafts/x",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 31, 3], [32, 64, 0]],
    }
    assert vllm_config("kd", "small", {1: 4, 8: 4}) == {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 4,
    }
    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 3}
    assert vllm_config("ngram", None, {1: 3}) == lookup
    assert vllm_config("eagle3", "x", {1: 0, 8: 0}) is None


def test_medusa_heads_take_one_k_in_vllm():
    """Of a table, that of the smallest concurrency that drafts."""
    assert vllm_config("medusa", "heads", {1: 0, 4: 3, 16: 5, 64: 0}) == {
        "method": "medusa",
        "model": "heads",
        "num_speculative_tokens": 3,
    }
    assert vllm_config("medusa", "heads", {1: 2, 8: 2})["num_speculative_tokens"] == 2
    assert vllm_config("medusa", "heads", {1: 0}) is None
    smaller, one = engine_settings("medusa", "heads", FALLING)["notes"]
    assert "--model-loader-extra-config" in smaller and "enable_weights_track" in smaller and "no table" in one
    assert engine_settings("medusa", "heads", {1: 3})["notes"] == [smaller]


def test_sglang_takes_steps_top_k_and_draft_tokens():
    chain = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    found = sglang_flags("eagle3", "drafts/x", {1: 3, 8: 3})
    start = "--speculative-algorithm EAGLE3 --speculative-draft-model-path drafts/x"
    assert " ".join(found["flags"]) == f"{start} {chain}" and found["adaptive_config"] is None
    found = sglang_flags("eagle3", "drafts/x", FALLING)
    assert found["adaptive_config"] == {
        "1": {"candidate_steps": [5]},
        "2": {"candidate_steps": [3]},
        "32": {"candidate_steps": [0]},
    }
    # The start value must be one of the candidates, and draft tokens follow it.
    assert " ".join(found["flags"]).endswith(
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6 "
        "--speculative-adaptive --speculative-adaptive-config sglang-adaptive.json"
    )


def test_sglang_has_a_table_for_eagle_only():
    found = sglang_flags("kd", "small", {1: 3, 8: 0})
    assert found["flags"][:2] == ["--speculative-algorithm", "STANDALONE"] and found["adaptive_config"] is None
    assert found["flags"][-1] == "4" and "--speculative-adaptive" not in found["flags"]
    assert sglang_flags("ngram", None, {1: 0, 8: 5})["flags"] == [
        *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
        *("--speculative-num-draft-tokens", "6"),
    ]
    assert sglang_flags("eagle3", "x", {1: 0}) is None


def test_only_engines_that_serve_the_kind_are_written():
    assert "sglang" not in engine_settings("medusa", "heads", {1: 3})
    found = engine_settings("eagle3", "drafts/x", FALLING)
    assert found["best_k"] == {"1": 5, "4": 3, "16": 3, "64": 0} and len(found["notes"]) == 2
    none = engine_settings("eagle3", "drafts/x", {1: 0})
    assert none["vllm"] is None and none["sglang"] is None and "without a draft" in none["notes"][0]
    assert engine_settings("eagle3", "drafts/x", {1: 3})["notes"] == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vllm_config("tree", "x", {1: 3}), "vLLM serves no draft of kind 'tree'"),
        (lambda: sglang_flags("medusa", "x", {1: 3}), "SGLang serves no draft of kind 'medusa'"),
        (lambda: vllm_config("eagle3", None, {1: 3}), "need its folder"),
        (lambda: ranges({}), "expected"),
        (lambda: ranges({0: 3}), "expected"),
        (lambda: ranges({1: -1}), "expected"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(SettingsError, match=message):
        call()


def test_files(tmp_path):
    settings = engine_settings("eagle3", "drafts/x", FALLING)
    paths = write_settings(settings, tmp_path)
    assert sorted(path.name for path in paths) == ["sglang-adaptive.json", "sglang-flags.txt", "vllm-speculative.json"]
    assert json.loads((tmp_path / "vllm-speculative.json").read_text()) == settings["vllm"]
    flags = shlex.split((tmp_path / "sglang-flags.txt").read_text())
    named = tmp_path / "sglang-adaptive.json"
    assert flags[-1] == str(named) and json.loads(named.read_text()) == settings["sglang"]["adaptive_config"]
    (empty := tmp_path / "none").mkdir()
    assert write_settings(engine_settings("medusa", "heads", {1: 0}), empty) == []
