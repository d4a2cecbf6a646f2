"""scripts/bench_peer.py: the same batches for both sides, what the peer is told, and the paired difference."""

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data.batching import TokenBudgetSampler
from drafttrain.data.run_folder import RunError
from drafttrain.target import Target
from tests.load_script import load_script
from tests.tiny_models import make_model

bench = load_script("bench_peer")

ROWS = [{"index": i, "input_ids": [1] * (10 + i % 7)} for i in range(40)]


def test_the_peer_sees_the_batches_of_our_first_epoch() -> None:
    batches = bench.batches_of(ROWS, 64, 3, 200)
    ours = TokenBudgetSampler([len(row["input_ids"]) for row in ROWS], 64, 1, 3).batches()
    assert batches == ours[: len(batches)]
    sizes = [sum(len(ROWS[i]["input_ids"]) for i in batch) for batch in batches]
    assert sum(sizes[:-1]) < 200 <= sum(sizes)
    assert bench.batches_of(ROWS, 64, 4, 200) != batches


def test_too_few_rows_are_named() -> None:
    with pytest.raises(RunError, match=r"hold 515 tokens, --tokens is 9999.*--train-prompts"):
        bench.batches_of(ROWS, 64, 0, 9999)


def test_our_recipe_ends_where_the_peers_batches_end(tmp_path) -> None:
    target = Target.from_model(make_model("Llama"), name="x/y")
    training = bench.ours_recipe(target, tmp_path, 112, 2, 7).training
    assert (training.seed, training.max_minutes, training.max_steps, training.eval_steps) == (2, None, 7, 7)
    assert (training.acceptance_steps, training.save_steps) == (7, 7)


def test_the_difference_is_of_pooled_acceptance_lengths_over_all_seeds() -> None:
    counts = {
        "ours-0": {"accepted": [6, 4], "iterations": [4, 4]},
        "ours-1": {"accepted": [2, 0], "iterations": [4, 4]},
        "peer-0": {"accepted": [4, 2], "iterations": [4, 4]},
        "peer-1": {"accepted": [1, 1], "iterations": [4, 4]},
    }
    value, (low, high) = bench.difference(counts, [0, 1])
    assert value == pytest.approx(12 / 16 - 8 / 16)
    # Drawn with replacement from two prompts: 3/8 and 1/8 are the differences where one is drawn twice.
    assert (low, high) == (pytest.approx(1 / 8), pytest.approx(3 / 8))
    value, _ = bench.difference(counts, [1])
    assert value == 0


def test_the_peer_is_told_the_effective_final_norm(tmp_path) -> None:
    """Gemma multiplies by 1 + w: a module that multiplies by what is written must give the target's own norm."""

    class Source:
        def attach(self, batch):
            T = batch.input_ids.shape[1]
            batch.features, batch.last_hidden = torch.ones(1, T, 6), torch.ones(1, T, 32)
            return batch

    class Ready:
        rows = {"train": [{"index": i, "input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1]} for i in range(2)]}
        vocab = type("Vocab", (), {"ids": [3, 5, 8]})

        def source(self, recipe, target, split):
            return Source()

    target = Target.from_model(make_model("Gemma3"), name="tiny")
    torch.nn.init.normal_(target.final_norm.weight, std=0.5)
    bench.write_data(Ready(), None, target, tmp_path)
    own, rows = load_file(tmp_path / "target.safetensors"), load_file(tmp_path / "rows.safetensors")
    x = torch.randn(4, target.hidden_size)
    plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + target.rms_norm_eps) * own["final_norm"]
    torch.testing.assert_close(plain, target.final_norm(x).float(), rtol=1e-4, atol=1e-4)
    assert rows["starts"].tolist() == [0, 3, 6]
    assert rows["input_ids"].tolist() == [5, 6, 7, 5, 6, 8]
    assert torch.equal(own["head"], target.head(torch.tensor([3, 5, 8])).weight.float())
