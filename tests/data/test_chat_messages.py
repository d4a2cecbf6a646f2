"""Messages of unusual kinds: parts, missing content, reasoning under three names, other roles, tools in other forms."""

import json

import pytest

from drafttrain.data.chat import encode
from drafttrain.data.chat_answers import answer_message, tokens_of_message
from drafttrain.data.chat_spans import mark_parts
from drafttrain.data.conversations import DataError, parse_row
from tests.data import chat_families as f
from tests.data.chat_tokenizers import CHATML, by_hand, make_tokenizer

USER = {"role": "user", "content": "a"}
IMAGE = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "x.png"}}]
FLAT = {"name": "now", "parameters": {"type": "object", "required": None}}


def parse(*messages, **more):
    return parse_row({"messages": list(messages), **more}, "auto", "f:1")


def assistant(**more):
    return {"role": "assistant", **more}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}], "a\nb\nc"),
        ([], ""),
    ],
)
def test_text_parts_are_joined(content, text):
    assert parse({"role": "user", "content": content}).messages == ({"role": "user", "content": text},)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name):
    found = parse(USER, assistant(content="b", **{name: "p"})).messages[1]
    assert found == {"role": "assistant", "content": "b", "reasoning_content": "p"}
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "p"}]}, {"type": "text", "text": "b"}]
    assert parse(USER, assistant(content=parts)).messages[1] == found
    empty = parse(USER, assistant(content="b", **{name: None})).messages[1]
    assert empty == {"role": "assistant", "content": "b"}


def test_other_roles():
    call = {"name": "now", "arguments": "{}"}
    old = parse(
        {"role": "developer", "content": "D"},
        USER,
        assistant(content=None, function_call=call),
        {"role": "function", "name": "now", "content": "3"},
        assistant(content="b"),
    )
    assert [message["role"] for message in old.messages] == ["developer", "user", "assistant", "tool", "assistant"]
    assert old.messages[2]["tool_calls"] == [{"type": "function", "function": call}]
    assert old.messages[2]["content"] is None and old.messages[3]["name"] == "now"
    rows = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "observation", "value": "c"}]
    assert parse_row({"conversations": rows}, "auto", "f:1").messages[2] == {"role": "tool", "content": "c"}


@pytest.mark.parametrize("tools", [[FLAT], json.dumps([FLAT]), [{"type": "function", "function": FLAT}]])
def test_tools_in_one_form_without_the_keys_that_tables_fill_in(tools):
    found = parse(USER, assistant(content="b"), tools=tools).tools
    assert found == ({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},)
    assert parse(USER, tools="[]").tools is None and parse(USER, tools=[]).tools is None


@pytest.mark.parametrize(
    ("messages", "more", "message"),
    [
        ([USER, assistant(content=None)], {}, "message 2: content: found NoneType None, expected a string"),
        ([USER, assistant(tool_calls=[{"id": "x"}])], {}, "message 2: found dict .* for tool call 1, expected a func"),
        ([USER, assistant(tool_calls="now()")], {}, "message 2: found str 'now\\(\\)' for tool_calls, expected a list"),
        ([USER, assistant(content="b", thinking=3)], {}, "message 2: the reasoning: found int 3, expected a string"),
        ([USER], {"tools": "now"}, "tools: found text that is no JSON"),
        ([USER], {"tools": [{"description": "x"}]}, "tools: found list .*, expected a list of functions"),
        ([USER], {"tools": {"name": "now"}}, "tools: found list|tools: found dict"),
        ([USER, {"role": "tool", "content": "3"}], {}, "roles do not alternate: found user, tool"),
        ([USER, assistant(content="b"), assistant(content="c")], {}, "roles do not alternate"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], {}, "expected a string or a list of text parts"),
    ],
)
def test_wrong_messages_name_row_and_message(messages, more, message):
    with pytest.raises(DataError, match=f"f:1: .*{message}|f:1: {message}"):
        parse(*messages, **more)


def test_what_is_not_text_drops_the_row():
    row = parse({"role": "user", "content": IMAGE}, assistant(content="b"))
    found = encode(row, make_tokenizer(CHATML), chat="auto", max_length=99, stop_ids=(1,))
    assert (found.dropped, found.input_ids) == ("content that is not text alone (image_url)", [])
    assert found.source == "f:1"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_developer_is_the_system_where_the_template_knows_no_such_role(role):
    row = parse({"role": role, "content": "D"}, USER, assistant(content="b"))
    tokenizer = f.QWEN.tokenizer(CHATML)
    found = encode(row, tokenizer, chat="auto", max_length=99, stop_ids=f.QWEN.stop_ids(tokenizer))
    given = "<|im_start|>system\nD<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert (found.input_ids, found.loss_mask) == by_hand(tokenizer, given, "b<|im_end|>", "\n")


def test_marks_leave_blank_parts_and_arguments_alone():
    messages = parse(USER, assistant(content=" ", tool_calls=[{"name": "now", "arguments": {"z": 1}}])).messages
    marked, contents = mark_parts(messages, "M")
    assert contents == {(0, "a"): "a", (1, "t0"): "now"} and marked[1]["content"] == " "
    assert marked[1]["tool_calls"][0]["function"] == {"name": "M1t0z", "arguments": {"z": 1}}
    assert messages[1]["tool_calls"][0]["function"]["name"] == "now"


# What the target wrote, as a message and back.


@pytest.mark.parametrize(
    ("family", "template", "prompt", "text", "content", "reasoning"),
    [
        (f.QWEN, f.QWEN3, "x\n", "<think>\np\n</think>\n\nb<|im_end|>", "b", "p"),
        (f.QWEN, f.QWEN3, "x\n", "<think>\n\n</think>\n\nb<|im_end|>", "b", None),
        (f.QWEN, f.QWEN3, "x\n", "b<|im_end|>", "b", None),
        (f.QWEN, f.QWEN3, "x\n", "<think>\np", "", "p"),
        (f.QWEN, CHATML, "x\n", "<think>\np\n</think>b<|im_end|>", "<think>\np\n</think>b", None),
        (f.DEEPSEEKS, f.R1, "x<think>\n", "p</think>b<｜end▁of▁sentence｜>", "b", "p"),
        (f.DEEPSEEKS, f.R1, "x<think>\n", "p and", "", "p and"),
        (
            f.GPT_OSS,
            f.HARMONY,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>p<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
            "b",
            "p",
        ),
        (f.GPT_OSS, f.HARMONY, "<|start|>assistant", "<|channel|>final<|message|>b<|return|>", "b", None),
    ],
)
def test_answer_as_a_message(family, template, prompt, text, content, reasoning):
    tokenizer = family.tokenizer(template)
    (asked, _), (tokens, _) = by_hand(tokenizer, prompt), by_hand(tokenizer, text)
    found = answer_message(tokens, tokenizer, asked, family.stop_ids(tokenizer))
    assert (found["content"], found.get("reasoning_content")) == (content, reasoning)


def test_a_message_as_the_tokens_of_its_template():
    tokenizer = f.QWEN.tokenizer(f.QWEN3)
    asked, _ = by_hand(tokenizer, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    options = (tokenizer, "auto", None, f.QWEN.stop_ids(tokenizer))
    message = {"role": "assistant", "content": "b", "reasoning_content": "p"}
    expected, _ = by_hand(tokenizer, "<think>\np\n</think>\n\nb<|im_end|>")
    assert tokens_of_message(message, [USER], asked, *options) == expected
    assert tokens_of_message(message, [USER], [*asked, 5], *options) is None
    # R1's template forgets the thought: what the target wrote cannot be told.
    tokenizer = f.DEEPSEEKS.tokenizer(f.R1)
    asked, _ = by_hand(tokenizer, "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>")
    options = (tokenizer, "auto", None, f.DEEPSEEKS.stop_ids(tokenizer))
    assert tokens_of_message(message, [USER], asked, *options) is None
    spoken, _ = by_hand(tokenizer, "b<｜end▁of▁sentence｜>")
    assert tokens_of_message({"role": "assistant", "content": "b"}, [USER], asked, *options) == spoken
