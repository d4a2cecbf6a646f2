"""The mask shown to a person: what is marked is what is supervised, token by token, and what is dropped is named."""

import json
import re

import pytest
from rich.console import Console

from drafttrain.data.chat import NOTHING, Encoded, encode
from drafttrain.data.regenerate import TOO_LONG
from drafttrain.data.show_mask import GIVEN, SUPERVISED, MaskReport, mask_report, mask_text, token_texts
from drafttrain.recipe import parse_recipe
from tests.data.chat_tokenizers import CHATML, make_tokenizer, stops, talk
from tests.training.tiny_run import make_target, open_run, prompt_rows, settings, text_rows, write_recipe, write_rows


def recipe_of(folder, rows, **data):
    values = settings(folder)
    write_rows(folder / "train.jsonl", rows)
    values["data"] |= data
    return parse_recipe(values, folder)


def encoded(*contents) -> tuple[Encoded, object]:
    tokenizer = make_tokenizer(CHATML)
    return encode(talk(*contents), tokenizer, chat="auto", max_length=99, stop_ids=stops(tokenizer)), tokenizer


def report(*shown: Encoded) -> MaskReport:
    tokens, supervised = (sum(len(one.input_ids) for one in shown), sum(sum(one.loss_mask) for one in shown))
    return MaskReport("train", len(shown), len(shown), tokens, supervised, list(shown))


def test_brackets_hold_the_supervised_tokens_and_nothing_else() -> None:
    one, tokenizer = encoded("h\u00e9", "a\nb", "ok", "c")
    text = mask_text(report(one), tokenizer, coloured=False).plain
    body = text.split("\n", 1)[1]
    assert (
        body.startswith("<|im_start|>|u|s|e|r|⏎\n|h|")
        and "[a][⏎\n][b][<|im_end|>]" in body
        and "[c][<|im_end|>]" in body
    )
    assert "".join(re.findall(r"\[(.*?)\]", body, re.DOTALL)).replace("⏎", "") == "a\nb<|im_end|>c<|im_end|>"
    plain = re.sub(r"[\[\]]", "", body.split("\n\ntrain:")[0]).replace("⏎", "")
    assert re.sub(r"(?<=\w|>|\n|\ufffd|é)\|(?=\w|<|\n|é)", "", plain).replace("|", "") == tokenizer.decode(
        one.input_ids
    ).replace("|", "")
    assert f"{len(one.input_ids)} tokens, 6 supervised ({6 / len(one.input_ids):.0%})" in text


def test_colours_are_the_mask() -> None:
    one, tokenizer = encoded("hi", "a b", "ok", "c")
    text = mask_text(report(one), tokenizer, coloured=True)
    pieces = token_texts(one.input_ids, tokenizer)
    start = text.plain.index("\n") + 1
    spans = {span.start: (span.end, span.style) for span in text.spans}
    for position, (piece, mask) in enumerate(zip(pieces, one.loss_mask, strict=True)):
        shown = piece.replace("\n", "⏎\n")
        end, style = spans.get(start, (start + len(shown), GIVEN[1]))
        assert text.plain[start:end] == shown and style == (SUPERVISED if mask else GIVEN)[position % 2]
        start = end
    console = Console(force_terminal=True, width=200)
    with console.capture() as capture:
        console.print(text)
    assert "\x1b[1;32m" in capture.get()


def test_token_texts_add_up_and_a_split_character_is_shown_by_its_last_token() -> None:
    tokenizer = make_tokenizer(CHATML)
    ids = tokenizer("aé€ b\U0001f600c<|im_end|>")["input_ids"]
    pieces = token_texts(ids, tokenizer)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)
    assert pieces[pieces.index("\U0001f600") - 3 : pieces.index("\U0001f600")] == ["", "", ""]
    cut = ids[: len(pieces) - 1 - pieces[::-1].index("\U0001f600")]
    assert token_texts(cut, tokenizer)[-1] == "\ufffd"
    assert token_texts([], tokenizer) == []


def test_counts_and_dropped_conversations_with_an_example(tmp_path) -> None:
    rows = [
        {"prompt": "w1 w2", "completion": " w3"},
        {"prompt": "w1 w2 w3 w4 w5 w6 w7 w8 w9", "completion": " w3"},
        {"prompt": "w7"},
        {"prompt": "w1 w2 w3 w4 w5 w6 w7 w8 w10", "completion": " w3"},
        {"prompt": "w4", "completion": " w5 w6"},
    ]
    recipe = recipe_of(tmp_path, rows, max_length=6)
    target = make_target(recipe)
    found = mask_report(recipe, target, 9)
    assert (found.conversations, found.kept, found.tokens, found.supervised) == (5, 2, 4 + 4, 2 + 3)
    assert [one.source[-2:] for one in found.shown] == [":1", ":5"]
    text = mask_text(found, target.tokenizer, coloured=False).plain
    assert "train: 5 conversations, 2 kept, 8 tokens, 5 supervised (62%)" in text
    path = tmp_path / "train.jsonl"
    assert f"dropped 2: no supervised token within max_length; such as {path}:2: w1" in text
    assert f"dropped 1: {NOTHING}; such as {path}:3: w7 .." in text
    assert [one.source[-2:] for one in mask_report(recipe, target, 1).shown] == [":1"]
    nothing = recipe_of(tmp_path, rows[1:4], max_length=6)
    assert "nothing is left to train on" in mask_text(mask_report(nothing, target, 3), target.tokenizer, True).plain


def test_conversations_are_spread_over_the_data(tmp_path) -> None:
    recipe = recipe_of(tmp_path, text_rows(12, 1))
    shown = mask_report(recipe, make_target(recipe), 4).shown
    assert [int(one.source.rsplit(":", 1)[1]) for one in shown] == [1, 4, 7, 10]


def test_only_the_shown_conversations_are_answered(tmp_path) -> None:
    rows = prompt_rows(6, 1)
    rows[3]["prompt"] = " ".join(["w9"] * 30)
    recipe = recipe_of(tmp_path, rows, max_length=20, regenerate={"max_new_tokens": 4})
    target = make_target(recipe)
    found = mask_report(recipe, target, 2)
    assert (found.conversations, found.kept) == (2, 1) and 1 <= sum(found.shown[0].loss_mask) <= 4
    text = mask_text(found, target.tokenizer, coloured=False).plain
    assert "only the conversations above were answered" in text
    assert f"dropped 1: {TOO_LONG}; such as {tmp_path / 'train.jsonl'}:4: w9" in text


# The command line.


@pytest.mark.parametrize(("arguments", "count"), [((), 3), (("5",), 5), (("data.max_length=9", "2"), 2)])
def test_the_verb_shows_and_writes_nothing(cli, tmp_path, arguments, count) -> None:
    recipe = write_recipe(tmp_path, settings(tmp_path))
    before = {path.name for path in tmp_path.iterdir()}
    status, out, err = cli("prepare", recipe, "--show-mask", *arguments, "--output", tmp_path / "run")
    assert status == 0, err
    assert out.count("supervised (") == count + 1 and "[w" in out and "\x1b[" not in out
    assert "train: 24 conversations, 24 kept" in out and "nothing was written" in out
    assert {path.name for path in tmp_path.iterdir()} == before


def test_the_verb_with_json_and_of_a_run(cli, tmp_path) -> None:
    values = settings(tmp_path)
    recipe = parse_recipe(values, tmp_path)
    run = open_run(tmp_path / "run", recipe)
    status, out, err = cli("prepare", run.path, "--show-mask", "2", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["conversations"], found["kept"], len(found["shown"])) == (24, 24, 2)
    [first, _] = found["shown"]
    assert len(first["tokens"]) == len(first["input_ids"]) == len(first["loss_mask"])
    target = make_target(recipe)
    assert "".join(first["tokens"]) == target.tokenizer.decode(first["input_ids"])
    assert {path.name for path in run.path.iterdir()} == {"recipe.yaml"}
