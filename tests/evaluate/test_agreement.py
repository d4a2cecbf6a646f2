"""The verdict on whether another program accepts as we do, and what our side of it is."""

import json

import pytest
import torch
from rich.console import Console

from drafttrain.drafts.kd import IDS_FILE
from drafttrain.evaluate.agreement import agreement, agreement_table, columns, decode_one, proposer_as_served
from drafttrain.export.folder import save_draft
from drafttrain.specdec.decode import generate
from drafttrain.target import load_target
from tests.tiny_medusa import fresh_heads
from tests.tiny_models import V, make_model, save

PROMPT = [1, 9, 30, 12]


def per_prompt(accepted: list[int], reached: list[list[int]]) -> dict:
    return {"draft_rounds": [10] * len(accepted), "accepted": accepted, "reached": reached}


def test_the_verdict():
    ours = per_prompt([12, 8], [[8, 4], [6, 2]])
    same = agreement(ours, ours, 2)
    assert (same["ours"]["tau"], same["theirs"]["per_position"]) == (2.0, [0.7, 0.3])
    assert same["tau"]["interval"] == [0.0, 0.0] and same["agrees"] is True

    # One more accepted in 20 rounds of tau 2: +2.5% of tau, +.05 at the first position.
    shifted = agreement(ours, per_prompt([13, 8], [[9, 4], [6, 2]]), 2)
    assert shifted["tau"]["relative_difference"] == pytest.approx(0.025)
    assert shifted["tau"]["agrees"] is True
    assert [one["agrees"] for one in shifted["positions"]] == [False, True]
    assert shifted["agrees"] is False

    # Opposite shifts cancel in tau, but the interval is as wide as the prompts differ: 20 against 22, 20 against 18.
    scattered = agreement(per_prompt([10, 10], [[10]] * 2), per_prompt([12, 8], [[10]] * 2), 1)
    assert scattered["tau"]["relative_difference"] == 0
    assert scattered["tau"]["interval"] == pytest.approx([-0.1, 0.1])
    assert scattered["agrees"] is False


def test_the_table_says_which_figure_disagrees():
    # Drawn twice, the first prompt gives 23 tokens against 22.
    result = agreement(per_prompt([12, 8], [[8, 4], [6, 2]]), per_prompt([13, 8], [[9, 4], [6, 2]]), 2)
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(agreement_table(result, "engine"))
    rows = [line for line in captured.get().splitlines() if "agree" in line.lower()]
    assert ["DISAGREES" in row for row in rows] == [False, True, False]
    assert "+2.50% [+0.00%, +4.55%]" in rows[0] and "+0.050" in rows[1]


def test_one_prompt_of_our_side(tmp_path):
    target = load_target(str(save(tmp_path / "target", make_model("Llama"))), dtype="float32")
    row = decode_one(target, PROMPT, proposer_as_served(tmp_path / "target", target), 3, 8)
    plain = decode_one(target, PROMPT, None, 3, 8)
    # The target as its own draft: every round brings 4 tokens behind the first.
    assert (row["draft_rounds"], row["accepted"], row["reached"]) == (2, 6, [2, 2, 2])
    assert row["tokens"] == plain["tokens"] and len(row["tokens"]) == 8
    assert row["decoded"] == 7 and 0 < row["seconds"] < row["whole"]
    assert (plain["draft_rounds"], plain["accepted"], plain["reached"]) == (0, 0, [])
    assert columns([row, plain])["draft_rounds"] == [2, 0]


def test_a_draft_vocabulary_is_left_aside(tmp_path):
    target = load_target(str(save(tmp_path / "target", make_model("Llama"))), dtype="float32")
    folder = save(tmp_path / "draft", make_model("Llama"))
    missing = generate(target, [PROMPT], max_new_tokens=2, stop_ids=()).generations[0].tokens[1]
    ids = torch.tensor([i for i in range(V) if i != missing])
    (folder / IDS_FILE).write_text(json.dumps(ids.tolist()))
    # Without that word the first draft would be another one.
    assert decode_one(target, PROMPT, proposer_as_served(folder, target), 2, 4)["reached"] == [1, 1]


def test_medusa_heads_draft_in_the_targets_dtype(tmp_path):
    target = load_target(str(save(tmp_path / "target", make_model("Llama"))), dtype="float32")
    plain = decode_one(target, PROMPT, None, 2, 4)["tokens"]
    # Own heads that draft one word each behind the prompt, the right one.
    draft = fresh_heads(target, heads=2, own_heads=True).requires_grad_(False)
    last = target.hidden_states(torch.tensor([PROMPT]), None, [target.num_layers])[target.num_layers][0, -1]
    for i, head in enumerate(draft.lm_heads):
        head.weight.zero_()
        head.weight[plain[1 + i]] = target.final_norm(last)
    save_draft(draft, target, tmp_path / "draft", torch.bfloat16)
    proposer = proposer_as_served(tmp_path / "draft", target)
    assert proposer.max_k == 2 and proposer.draft.lm_heads[0].weight.dtype == torch.float32
    row = decode_one(target, PROMPT, proposer, 2, 4)
    assert row["tokens"] == plain and row["reached"] == [1, 1]
