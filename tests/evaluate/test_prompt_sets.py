"""Prompt sets: the built-in ones keep what their questions ask for, files are read or refused by line, ids by hand."""

import json
import re
from collections import Counter

import datasets
import huggingface_hub
import pytest

from drafttrain.data.conversations import DataError
from drafttrain.evaluate import prompt_sets
from drafttrain.evaluate.long_context import long_prompts
from drafttrain.evaluate.prompt_sets import CATEGORIES, PromptRow, expand_turns, load_prompt_set, prompt_tokens
from drafttrain.evaluate.report import EvaluationError
from tests.data.chat_tokenizers import CHATML, GEMMA, by_hand, make_tokenizer
from tests.tiny_drafts import make_target

USER, ANSWER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
TALK = PromptRow("a", None, ({"role": "user", "content": "hi"},), None, ("why", "so"))


def user(text):
    return ({"role": "user", "content": text},)


@pytest.fixture
def write(tmp_path):
    def save(*rows, name="p.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return save


# The built-in prompts.


def test_builtin_has_eight_categories_of_ten_different_prompts():
    rows = load_prompt_set("builtin")
    assert Counter(row.category for row in rows) == dict.fromkeys(CATEGORIES, 10)
    said = [text for row in rows for text in (row.messages[0]["content"], *row.turns)]
    assert len(set(said)) == len(said) and all(text == text.strip() for text in said)
    assert [row.id for row in rows] == [f"{category}-{i:02d}" for category in CATEGORIES for i in range(1, 11)]
    two = Counter(row.category for row in rows if row.turns)
    assert two["chat"] >= 3 and two["math"] >= 3 and all(len(row.turns) <= 1 for row in rows)


def test_builtin_categories_can_be_picked_in_the_name_or_beside_it():
    picked = load_prompt_set("builtin:math, code")
    assert {row.category for row in picked} == {"math", "code"} and len(picked) == 20
    assert picked == load_prompt_set("builtin", categories=["code", "math"])


def test_long_prompts_are_long_and_the_same_each_time():
    rows = long_prompts()
    assert rows == long_prompts() and len(rows) == 10
    for row in rows:
        assert 4_500 <= len(row["turns"][0]) <= 20_000
        assert not re.search(r"\{[a-z]+\}", row["turns"][0]), "a placeholder was left"


def test_log_is_slow_between_release_and_roll_back_only():
    lines = long_prompts()[0]["turns"][0].split("\n\n")[1].splitlines()
    (out,), (back,) = ([i for i, line in enumerate(lines) if mark in line] for mark in ("-> 2.32.0", "roll back"))
    slow = [i for i, line in enumerate(lines) if (took := re.search(r"took=(\d+)", line)) and int(took[1]) >= 900]
    assert len(slow) >= 3 and all(out < i < back for i in slow)
    assert {lines[i].split()[2] for i in slow} == {"checkout", "basket"}


def test_one_total_of_the_orders_is_wrong():
    rows = [line.split(",") for line in long_prompts()[4]["turns"][0].split("\n\n")[0].splitlines()[1:]]
    assert [row[0] for row in rows if int(row[4]) * int(row[5]) != int(row[6])] == ["7071"]


def test_two_settings_break_the_rules():
    text = long_prompts()[2]["turns"][0]
    ports = Counter(re.findall(r"port: (\d+)", text))
    assert [port for port, count in ports.items() if count > 1] == ["8107"]
    assert [int(found) for found in re.findall(r"TIMEOUT_SECONDS: (\d+)", text) if int(found) > 30] == [45]
    pairs = re.findall(r"requests: .*?(\d+)Mi.*\n.*limits: .*?(\d+)Mi", text)
    assert len(pairs) == 10 and all(int(limit) == 2 * int(request) for request, limit in pairs)


def test_one_sensor_sticks_from_the_first_evening_on():
    lines = [line for line in long_prompts()[8]["turns"][0].splitlines() if line.startswith("| ")]
    columns = list(zip(*([cell.strip() for cell in line.split("|")[2:-1]] for line in lines), strict=True))
    stuck = {column[0] for column in columns if len(set(column[41:])) == 1}
    assert len(lines) == 85 and stuck == {"west"}


def test_one_function_of_the_source_file_stores_the_raw_value():
    text = long_prompts()[9]["turns"][0]
    raw = [part.split("(")[0] for part in text.split("def ")[1:] if "= value\n" in part]
    assert raw == ["update_phone_supplier"] and text.count("value.strip()") == 23


# How many, and which.


@pytest.fixture
def uneven(write):
    return write(
        *({"id": f"{c}{i}", "category": c, "prompt": "x"} for c, n in (("a", 5), ("b", 1), ("c", 3)) for i in range(n))
    )


def test_count_is_spread_over_the_categories(uneven):
    def taken(count, seed=0):
        return [row.id for row in load_prompt_set(uneven, count, seed)]

    assert [name[0] for name in taken(7)] == ["a", "b", "c", "a", "c", "a", "c"]
    assert taken(4) == taken(7)[:4] and len(set(taken(99))) == 9
    assert len({tuple(taken(3, seed)) for seed in range(10)}) > 1
    assert [row.id for row in load_prompt_set(uneven)] == ["a0", "a1", "a2", "a3", "a4", "b0", "c0", "c1", "c2"]


@pytest.mark.parametrize("count", [0, -1])
def test_count_below_one(uneven, count):
    with pytest.raises(EvaluationError, match=f"found {count} prompts to take, expected at least 1"):
        load_prompt_set(uneven, count)


# Files.


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["r"]},
            PromptRow("81", "writing", user("one"), None, ("two",)),
        ),
        ({"prompt": ["one", "two"], "prompt_id": 5}, PromptRow("5", None, user("one"), None, ("two",))),
        ({"prompt": "say it", "completion": "it"}, PromptRow("p-1", None, user("say it"), None)),
        ({"question": "1+1?", "answer": "2", "category": None}, PromptRow("p-1", None, user("1+1?"), None)),
        ({"text": "Once upon", "id": "t"}, PromptRow("t", None, None, "Once upon")),
        (
            {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "a"))]},
            PromptRow("p-1", None, ({"role": "system", "content": "s"}, *user("u")), None),
        ),
        (
            {"conversations": [{"from": f, "value": v} for f, v in (("human", "u"), ("gpt", "a")) * 2]},
            PromptRow("p-1", None, user("u"), None, ("u",)),
        ),
        (
            {"messages": [{"role": r, "content": c} for r, c in (("user", "u"), ("assistant", "a"), ("user", "v"))]},
            PromptRow("p-1", None, (*user("u"), {"role": "assistant", "content": "a"}, *user("v")), None),
        ),
    ],
)
def test_row_forms(write, row, expected):
    assert load_prompt_set(write(row)) == [expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": []}, "found an empty list for turns, expected a list of at least one string"),
        ({"turns": "hello"}, "found str for turns"),
        ({"turns": ["a", 3]}, "turn 2: found int 3, expected a string"),
        ({"turns": ["a", " \n"]}, "turn 2: found nothing but white space"),
        ({"turns": ["\ud800"]}, "turn 1: found a lone surrogate"),
        ({"prompt": ""}, "prompt: found nothing but white space"),
        ({"messages": [{"role": "user", "content": ""}]}, "message 1: found nothing but white space"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "message 1: found the role 'narrator'"),
        ({"category": "code", "body": "x"}, "found the keys category, body, expected turns, messages, prompt or text"),
        ({"input_ids": [1, 2]}, "found the keys input_ids, expected turns"),
        ({"turns": ["a"], "category": 3}, "found the category 3, expected a string"),
        ({"turns": ["a"], "id": ["x"]}, r"found \['x'\] for id, expected a string or a number"),
        ({"turns": ["a"], "id": "first"}, r"found the id 'first' of .*p\.jsonl:1 again"),
        ([1], "found list, expected an object"),
        ("{broken", "broken JSON"),
    ],
)
def test_wrong_rows_are_named_by_file_and_line(write, row, message):
    path = write({"turns": ["fine"], "id": "first"}, "", row)
    with pytest.raises(DataError, match=rf"p\.jsonl:3: {message}"):
        load_prompt_set(path)


def test_empty_and_missing_files(write, tmp_path):
    with pytest.raises(DataError, match=r"empty\.jsonl: found an empty file"):
        load_prompt_set(write(name="empty.jsonl"))
    with pytest.raises(EvaluationError, match=r"absent\.jsonl': found no such file or folder.*builtin, mt-bench"):
        load_prompt_set(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mt_bench", "'mt_bench': did you mean mt-bench?"),
        ("HumanEvil", "did you mean humaneval?"),
        ("zzz", "'zzz': expected builtin, mt-bench, humaneval, gsm8k, spec-bench, or a file"),
        ("", "'': expected builtin"),
        ("builtin:cod", "found no category 'cod'; did you mean code?"),
        ("builtin:", "found no category ''; expected some of: chat, code"),
        ("spec-bench", r"Download https://\S+/question\.jsonl and pass the file: --prompts question\.jsonl"),
    ],
)
def test_unknown_names_say_what_is_meant(name, message):
    with pytest.raises(EvaluationError, match=message):
        load_prompt_set(name)


# The hub.


def test_hub_that_cannot_be_reached_names_the_set_and_the_way_out(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(EvaluationError, match=r"mt-bench: .*cannot be reached.*--prompts builtin, or --prompts FILE"):
        load_prompt_set("mt-bench")


HUB_ROWS = {
    ("HuggingFaceH4/mt_bench_prompts", None, "train"): {
        "prompt": ["one", "two"],
        "prompt_id": 7,
        "category": "stem",
        "reference": [],
    },
    ("openai/openai_humaneval", None, "test"): {
        "task_id": "Task/0",
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x\n",
        "test": "",
        "entry_point": "f",
    },
    ("openai/gsm8k", "main", "test"): {"question": "How many?", "answer": "Two"},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mt-bench", PromptRow("7", "stem", user("one"), None, ("two",))),
        ("gsm8k:math", PromptRow("gsm8k-1", "math", user("How many?"), None)),
        ("humaneval", PromptRow("Task/0", "code", user(prompt_sets.COMPLETE.format("def f(x):")), "def f(x):\n")),
    ],
)
def test_columns_of_the_hub_sets(monkeypatch, name, expected):
    """The hub is replaced by its columns; everything on this side of it runs."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda dataset, name, split: datasets.Dataset.from_list([HUB_ROWS[dataset, name, split]]),
    )
    assert load_prompt_set(name) == [expected]


# Token ids.


def ids(tokenizer, text):
    return by_hand(tokenizer, text)[0]


def test_template_puts_the_answers_between_the_turns():
    target = make_target(tokenizer=make_tokenizer(CHATML))
    first, second = f"{USER}hi{ANSWER}", f"{USER}hi{ANSWER}ok<|im_end|>\n{USER}why{ANSWER}"
    third = f"{second}no<|im_end|>\n{USER}so{ANSWER}"
    answer = ids(target.tokenizer, "no<|im_end|>")
    assert prompt_tokens(TALK, target, "auto") == ids(target.tokenizer, first)
    assert prompt_tokens(TALK, target, "template", ["ok"]) == ids(target.tokenizer, second)
    assert prompt_tokens(TALK, target, "auto", ["ok", "no"]) == ids(target.tokenizer, third)
    # The stop token of an answer given as ids is the template's to write.
    assert prompt_tokens(TALK, target, "auto", [ids(target.tokenizer, "ok"), answer]) == ids(target.tokenizer, third)
    with pytest.raises(AssertionError):
        prompt_tokens(TALK, target, "auto", ["a", "b", "c"])


def test_one_bos_with_a_template_that_writes_it():
    target = make_target(tokenizer=make_tokenizer(GEMMA))
    turn = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
    expected = f"<bos>{turn.format('hi')}ok<end_of_turn>\n{turn.format('why')}"
    assert prompt_tokens(TALK, target, "auto", [" ok\n"]) == ids(target.tokenizer, expected)


@pytest.mark.parametrize(("template", "chat"), [(CHATML, "none"), (None, "auto")])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_plain_text_joins_turns_and_answers_by_blank_lines(template, chat, adds_bos):
    target = make_target(tokenizer=make_tokenizer(template, adds_bos=adds_bos))
    bos = "<bos>" if adds_bos else ""
    assert prompt_tokens(TALK, target, chat) == ids(target.tokenizer, f"{bos}hi")
    assert prompt_tokens(TALK, target, chat, ["ok", ""]) == ids(target.tokenizer, f"{bos}hi\n\nok\n\nwhy\n\nso")


def test_text_is_continued_as_it_is_and_code_is_asked_for_where_there_is_a_template():
    plain, both = PromptRow("t", None, None, "Once "), PromptRow("c", None, user("complete f"), "def f")
    chatty, bare = (make_target(tokenizer=make_tokenizer(template)) for template in (CHATML, None))
    for target in (chatty, bare):
        assert prompt_tokens(plain, target, "auto") == ids(target.tokenizer, "<bos>Once ")
    assert prompt_tokens(both, chatty, "auto") == ids(chatty.tokenizer, f"{USER}complete f{ANSWER}")
    assert prompt_tokens(both, chatty, "none") == ids(chatty.tokenizer, "<bos>def f")
    assert prompt_tokens(both, bare, "auto") == ids(bare.tokenizer, "<bos>def f")


def test_missing_template_or_tokenizer_names_the_row_and_the_mend():
    with pytest.raises(DataError, match=r"prompt a: .*the tokenizer has none; use the instruction-tuned target"):
        prompt_tokens(TALK, make_target(tokenizer=make_tokenizer()), "template")
    refuses = make_tokenizer("{{ raise_exception('no system turn') }}")
    with pytest.raises(DataError, match=r"prompt a: .*refuses the conversation \(no system turn\)"):
        prompt_tokens(TALK, make_target(tokenizer=refuses), "auto")
    with pytest.raises(EvaluationError, match="the target has no tokenizer"):
        prompt_tokens(TALK, make_target(), "auto")


def test_later_turns_see_the_targets_own_answers():
    target = make_target(tokenizer=make_tokenizer(CHATML))
    single = PromptRow("b", None, user("bye"), None)
    asked = []

    def answer(tokens):
        asked.append(tokens)
        return f"answer {len(asked)}"

    entries = expand_turns([TALK, single], target, "auto", answer)
    assert [(row.id, turn) for row, turn, _ in entries] == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    assert asked == [entries[0][2], entries[1][2]], "asked only where another turn follows"
    text = f"{USER}hi{ANSWER}answer 1<|im_end|>\n{USER}why{ANSWER}answer 2<|im_end|>\n{USER}so{ANSWER}"
    assert entries[2][2] == ids(target.tokenizer, text)
    assert entries[3][2] == ids(target.tokenizer, f"{USER}bye{ANSWER}")
