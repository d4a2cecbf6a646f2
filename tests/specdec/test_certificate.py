"""The certificate passes on the loop's verification, catches planted faults, and its control fails every time."""

import json
import math
from dataclasses import replace

import pytest
import torch

from drafttrain.drafts.base import Proposal
from drafttrain.nn.sampling import Sampling, SamplingError, inverse_cdf, warp
from drafttrain.specdec import certificate as certificate_module
from drafttrain.specdec import verify as verify_module
from drafttrain.specdec.certificate import (
    SIGNIFICANCE,
    certificate,
    chi_squared,
    record_logits,
    resample_from_target,
    survival,
)
from drafttrain.specdec.verify import Typical, verify
from tests.tiny_drafts import make_target
from tests.tiny_models import V, tokens

CHECKS = {
    "greedy",
    *(f"exact_{shape}_{mode}" for shape in ("chain", "tree") for mode in ("one_hot", "probabilistic")),
    *(
        f"fixed_{shape}_{mode}_{what}"
        for shape in ("chain", "tree")
        for mode in ("one_hot", "probabilistic")
        for what in ("first", "joint")
    ),
}
RECORDED = {"recorded_greedy"} | {
    f"recorded_{mode}_{what}" for mode in ("one_hot", "probabilistic") for what in ("first", "joint")
}


def wide_logits(rows=4, width=2000, scale=2.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3)) * scale


def failed(result) -> set[str]:
    return {name for name, check in result["checks"].items() if not check["passed"]}


def test_survival_and_statistic_by_hand():
    assert survival(3.841458820694124, 1) == pytest.approx(0.05, rel=1e-9)
    assert survival(5.0, 2) == pytest.approx(math.exp(-2.5))
    assert survival(8.0, 4) == pytest.approx(math.exp(-4) * (1 + 4))
    assert survival(0.0, 0) == 1 and survival(math.inf, 3) == 0
    assert chi_squared(torch.tensor([60.0, 40.0]), torch.tensor([50.0, 50.0])) == (4.0, 1)


def test_small_cells_are_counted_as_one_and_impossible_ones_are_never_excused():
    expected = torch.tensor([90.0, 4.0, 3.0, 3.0])
    assert chi_squared(torch.tensor([90.0, 10.0, 0.0, 0.0]), expected) == (0.0, 1)
    # 3 alone are too few: they join the smallest of the others, 10.
    statistic, degrees = chi_squared(torch.tensor([87.0, 12.0, 1.0]), torch.tensor([87.0, 10.0, 3.0]))
    assert (statistic, degrees) == (0.0, 1)
    assert chi_squared(torch.tensor([100.0, 0.0]), torch.tensor([99.99, 0.01])) == (pytest.approx(0), 0)
    assert chi_squared(torch.tensor([99.0, 1.0]), torch.tensor([100.0, 0.0])) == (math.inf, 1)


def test_the_loops_verification_passes():
    result = certificate(wide_logits())
    assert result["passed"] and result["control"]["passed"] and not failed(result)
    assert set(result["checks"]) == CHECKS | RECORDED
    assert result["significance"] == SIGNIFICANCE == 1e-4 and result["draws"] >= 20_000
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["seconds"] < 20
    for name, check in result["checks"].items():
        if "p_value" in check:
            assert check["p_value"] > 1e-4 and check["degrees"] > 0
        else:
            assert check["largest_error"] <= (1e-6 if "exact" in name else 0)


def test_at_the_width_of_a_real_vocabulary():
    result = certificate(wide_logits(width=262_144))
    assert result["passed"] and result["seconds"] < 20
    assert result["checks"]["recorded_probabilistic_first"]["degrees"] > 50


def test_same_seed_same_figures():
    first, again, other = (certificate(seed=seed) for seed in (1, 1, 2))
    for result in (first, again, other):
        del result["seconds"]
    assert first == again != other


def test_the_control_fails_every_time_with_the_known_wrong_output():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        fixed = certificate_module._table_language(
            certificate_module.FIXED_P,
            certificate_module.FIXED_Q,
            certificate_module.CUT,
            "probabilistic",
            torch.device("cpu"),
        )
        control = certificate_module._check_control(fixed, verify, generator)
        assert control["passed"] and control["p_value"] < 1e-4
        assert control["first_token"] == pytest.approx([0.35, 0.39, 0.26, 0, 0], abs=0.02)


def test_a_control_that_does_not_fail_fails_the_certificate(monkeypatch):
    monkeypatch.setattr(certificate_module, "resample_from_target", lambda verify: verify)
    result = certificate()
    assert not failed(result) and not result["control"]["passed"] and not result["passed"]


def chain_sampler(fault: str | None = None):
    """Chains verified one position after the other, with a fault planted; trees and greedy as they are."""

    def sampler(logits, proposal, sampling, uniforms):
        if sampling.greedy or proposal.parents is not None:
            return verify(logits, proposal, sampling, uniforms)
        B, K = proposal.tokens.shape
        rows = torch.arange(B)
        p = warp(logits, replace(sampling, temperature=1.0) if fault == "p is not tempered" else sampling)
        p = warp(logits, replace(sampling, top_k=0)) if fault == "p is not filtered" else p
        q = torch.nn.functional.one_hot(proposal.tokens, p.shape[-1]).float()
        if proposal.q is not None:
            q = torch.zeros(B, K, p.shape[-1])
            q[:, :, proposal.q_ids] = proposal.q
        accepted, going = torch.zeros(B, dtype=torch.long), torch.ones(B, dtype=torch.bool)
        final = p[:, 0].clone()
        for i in range(K):
            token, trying = proposal.tokens[:, i], going & (i < proposal.lengths)
            at = min(i + 1, K) if fault == "p of the next position" else i
            ratio = p[rows, at, token] / q[rows, i, token].clamp_min(1e-30)
            stands = uniforms[:, i] < ratio
            if fault == "accepts where u > p/q":
                stands = uniforms[:, i] > ratio
            elif fault == "accepts what p finds likelier than q":
                stands = ratio >= 1
            residual = (p[:, i] - q[:, i]).clamp_min(0)
            if fault == "residual of absolute differences":
                residual = (p[:, i] - q[:, i]).abs()
            residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, p[:, i])
            bonus = p[:, i] if fault == "bonus from the last draft's position" else p[:, i + 1]
            final = torch.where((trying & stands)[:, None], bonus, final)
            final = torch.where((trying & ~stands)[:, None], residual, final)
            accepted, going = accepted + (trying & stands), trying & stands
        number = uniforms[rows, proposal.lengths]
        if fault == "one uniform for acceptance and replacement":
            number = uniforms[:, 0]
        path = torch.arange(K).expand(B, K)
        return path.masked_fill(path >= accepted[:, None], -1), inverse_cdf(final, number)

    return sampler


FAULTS = [
    "p is not tempered",
    "p is not filtered",
    "p of the next position",
    "accepts where u > p/q",
    "accepts what p finds likelier than q",
    "residual of absolute differences",
    "bonus from the last draft's position",
    "one uniform for acceptance and replacement",
]


def test_the_second_method_without_a_fault_passes():
    assert certificate(verify=chain_sampler())["passed"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_chains_is_caught(fault):
    result = certificate(verify=chain_sampler(fault))
    assert not result["passed"] and any(name.startswith("fixed_chain") for name in failed(result))
    assert all("chain" in name for name in failed(result))
    if "filtered" not in fault:  # The enumerated language is not filtered.
        assert any(name.startswith("exact_chain") for name in failed(result))


def test_resampling_from_the_target_is_caught():
    result = certificate(verify=resample_from_target(verify))
    assert not result["passed"]
    assert {"exact_chain_probabilistic", "fixed_chain_probabilistic_first", "fixed_chain_one_hot_joint"} <= failed(
        result
    )


def siblings_by_target(logits, proposal, sampling, uniforms):
    """The fault: of two drawn siblings the one that the target likes better is tried first."""
    if proposal.parents is None or sampling.greedy:
        return verify(logits, proposal, sampling, uniforms)
    N = proposal.tokens.shape[1]
    p = warp(logits[:, 0], sampling).gather(1, proposal.tokens[:, :2])
    swap = (p[:, 1] > p[:, 0]) & (proposal.lengths > 1)
    order = torch.arange(N).expand(len(p), N).clone()
    order[swap, 0], order[swap, 1] = 1, 0
    # Nodes that hang on one of the two now hang on its new place.
    parents = proposal.parents.clone()
    parents[(proposal.parents == 0) & swap[:, None]] = 1
    swapped = Proposal(proposal.tokens.gather(1, order), proposal.lengths, parents, proposal.q, proposal.q_ids)
    columns = torch.cat([torch.zeros(len(p), 1, dtype=torch.long), order + 1], 1)
    path, after = verify(
        logits.gather(1, columns[..., None].expand(-1, -1, logits.shape[2])), swapped, sampling, uniforms
    )
    return order.gather(1, path.clamp_min(0)).masked_fill(path < 0, -1), after


def test_siblings_ordered_by_the_target_are_caught():
    result = certificate(verify=siblings_by_target)
    assert {"exact_tree_probabilistic", "fixed_tree_probabilistic_first"} <= failed(result)
    assert all("tree_probabilistic" in name for name in failed(result)) and not result["passed"]


@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        ("_without", lambda before, left, refused: before),
        ("_without", lambda before, left, refused: torch.where(refused[:, None], left, before)),
        ("_residual", lambda p, *rest: p),
        ("_lookup", lambda q, q_ids, tokens: torch.ones(len(q), device=q.device)),
    ],
    ids=["nothing is taken out", "nothing is renormalised", "p as residual", "q of trees as one-hot"],
)
def test_faults_inside_the_loops_own_verification_are_caught(monkeypatch, name, faulty):
    monkeypatch.setattr(verify_module, name, faulty)
    result = certificate()
    caught = failed(result)
    assert not result["passed"] and any(name.startswith("exact") for name in caught)
    assert all(("chain" if name == "_residual" else "tree") in check for check in caught)


def test_typical_acceptance_is_no_lossless_sampler():
    result = certificate(verify=lambda *arguments: verify(*arguments, acceptance=Typical()))
    assert not result["passed"] and any(name.startswith("exact") for name in failed(result))


def test_a_draft_vocabulary_taken_for_the_targets_is_caught_on_recorded_logits_alone():
    """The tables' draft knows every token, so that only recorded logits, whose draft lacks some, tell."""

    def faulty(logits, proposal, sampling, uniforms):
        if proposal.q is not None:
            proposal = replace(proposal, q_ids=torch.arange(proposal.q.shape[-1]))
        return verify(logits, proposal, sampling, uniforms)

    assert certificate(verify=faulty)["passed"]
    result = certificate(wide_logits(), verify=faulty)
    assert failed(result) == {"recorded_probabilistic_first", "recorded_probabilistic_joint"}


@pytest.mark.parametrize("fault", ["one more", "second best"])
def test_greedy_faults_are_caught(fault):
    def faulty(logits, proposal, sampling, uniforms):
        path, after = verify(logits, proposal, sampling, uniforms)
        if not sampling.greedy:
            return path, after
        if fault == "second best":
            column = torch.where(path[:, -1] >= 0, path[:, -1] + 1, 0)
            return path, logits[torch.arange(len(path)), column].topk(2).indices[:, 1]
        more = ((path >= 0).sum(1) + 1).minimum(proposal.lengths)
        nodes = torch.arange(int(more.max())).expand(len(path), -1)
        return nodes.masked_fill(nodes >= more[:, None], -1), after

    result = certificate(wide_logits(rows=3), verify=faulty)
    assert {"greedy", "recorded_greedy"} == failed(result) and not result["passed"]


def test_recorded_logits_are_the_models_own_after_each_prefix():
    target = make_target()
    prompts = [tokens(1, n)[0].tolist() for n in (80, 3, 17, 9, 5)]
    logits = record_logits(target, prompts)
    assert logits.shape == (4, V) and logits.dtype == torch.float32
    for row, prompt in enumerate(prompts[:4]):
        own = target.model(torch.tensor([prompt[:64]])).logits[0, -1]
        torch.testing.assert_close(logits[row], own, rtol=1e-4, atol=1e-4)
    assert record_logits(target, prompts[:2], count=8).shape == (2, V)
    result = certificate(logits)
    assert result["passed"] and set(result["checks"]) == CHECKS | RECORDED


@pytest.mark.parametrize("logits", [wide_logits(rows=1), wide_logits(rows=3, scale=60.0)], ids=["one row", "peaked"])
def test_unusual_recordings(logits):
    logits = logits.clone()
    logits[:, 5:20] = -torch.inf
    assert certificate(logits)["passed"]


def test_nan_logits():
    logits = wide_logits()
    logits[2, 7] = torch.nan
    with pytest.raises(SamplingError, match="NaN"):
        certificate(logits)


def test_the_temperature_turns_the_tables_logits_into_p():
    """What is expected comes from the tables, not from the warping under test."""
    fixed = certificate_module._table_language(
        certificate_module.FIXED_P, certificate_module.FIXED_Q, (0.05, 0.02), "one_hot", torch.device("cpu")
    )
    by_hand = torch.tensor([0.5, 0.3, 0.2, 0, 0])
    torch.testing.assert_close(fixed.p[0], by_hand.double())
    torch.testing.assert_close(warp(fixed.logits[0], fixed.sampling), by_hand)
    assert fixed.logits[0].softmax(-1)[0] < 0.45 and fixed.sampling == Sampling(0.7, top_k=3)
