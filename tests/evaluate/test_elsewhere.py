"""What the roofline counts of each draft, and what it adds for small models."""

import torch

from drafttrain.drafts.kd import KdDraft
from drafttrain.evaluate.elsewhere import counted_shape, rooflines
from drafttrain.evaluate.roofline import LAYER_SECONDS, Roofline, find_device, predict, shape_of
from tests.tiny_students import IDS, make_draft, make_target


def run_of(kind: str, **changes) -> dict:
    keys = {"tree": None, "policy": None, "lossy": False, "trained": True, "concurrency": 1, "mode": "greedy", "k": 2}
    return {"draft": kind, "label": f"{kind} k=2", "per_position_acceptance": [0.6, 0.4], **keys, **changes}


def test_a_smaller_head_is_counted_as_it_is():
    target = make_target()
    whole, part = make_draft(target), make_draft(target, IDS)
    assert isinstance(part, KdDraft)
    assert counted_shape(whole) is whole.shape
    assert counted_shape(part) == shape_of(part.shape, len(IDS))
    assert counted_shape(part).fixed < shape_of(whole.shape).fixed


def test_layers_of_small_models_cost_their_kernels_as_in_plan():
    target = make_target()
    draft = make_draft(target, torch.arange(50))
    report = {"runs": [run_of("kd"), run_of("kd", k=3, quantization="int8"), run_of("ngram", trained=False)]}
    found = rooflines(report, target, {"kd": counted_shape(draft), "ngram": None}, ["H100"])
    assert [entry["label"] for entry in found] == ["kd k=2", "ngram k=2"]
    roofline = Roofline(find_device("H100"), layer_overhead=LAYER_SECONDS)
    expected = predict(roofline, target.config, counted_shape(draft), [0.6, 0.4], context=1024)
    assert found[0]["best"] == expected["best"]
    plain = predict(Roofline(find_device("H100")), target.config, None, [0.6, 0.4], context=1024)
    assert found[1]["best"] == plain["best"]
