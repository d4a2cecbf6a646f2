"""Answers by the target in thinking mode and with tools: what it wrote is supervised where it wrote it, and the past is
what the template makes of it. By hand, in process and from a server's chat endpoint.
"""

import json

import pytest

from drafttrain.data import server_answers as module
from drafttrain.data.chat import audit
from drafttrain.data.chat_template import Chat
from drafttrain.data.regenerate import regenerate
from drafttrain.data.show_mask import mask_text
from drafttrain.data.talks import CHANGED, UNWRITTEN, Talk, asked_of, encoded_of, goes_on, line_of, send
from drafttrain.recipe import RegenerateConfig
from tests.data import chat_families as f
from tests.data.chat_tokenizers import by_hand, talk
from tests.data.fake_completions import FakeCompletions
from tests.data.test_chat_families import RESULT, TOOL_TALK, calls, said
from tests.data.test_regenerate import table_target
from tests.data.test_show_mask import report as mask_report_of

HEADER = "<|im_start|>assistant\n"
FIRST = f"<|im_start|>user\none<|im_end|>\n{HEADER}"
PAST = f"<|im_start|>user\none<|im_end|>\n{HEADER}d<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n{HEADER}"
GOOD = {"content": "d", "reasoning_content": "p"}
THOUGHT = ("Ċ", "<think>", "p", "</think>", "d", "<|im_end|>")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.001)


def qwen(*chain):
    return table_target(f.QWEN.tokenizer(f.QWEN3), chain or THOUGHT)


def run(target, conversations, path, chat="auto", **settings):
    return regenerate(target, conversations, RegenerateConfig(**settings), path, chat=chat, max_length=512)


def plain(encoded):
    return [(one.input_ids, one.loss_mask, one.dropped) for one in encoded]


def rows(tokenizer, *runs):
    return [(*by_hand(tokenizer, *one), None) for one in runs]


# In process.


def test_each_thought_is_a_row_behind_a_past_without_thoughts(tmp_path):
    target, path = qwen(), tmp_path / "r.jsonl"
    found = run(target, [talk("one", "x", "two", "y")], path, Chat("auto", {"enable_thinking": True}))
    answer = "<think>p</think>d<|im_end|>"
    assert plain(found) == rows(target.tokenizer, (FIRST, answer), (PAST, answer))
    assert [one.source for one in found] == ["f.jsonl:1"] * 2
    again = run(target, [talk("one", "x", "two", "y")], path, Chat("auto", {"enable_thinking": True}))
    assert plain(again) == plain(found)
    text = mask_text(mask_report_of(*found), target.tokenizer, coloured=False).plain
    assert text.count("[<think>][p][</think>][d]") == 2


def test_thinking_off_closes_the_thought_in_the_header_alone(tmp_path):
    target, off = qwen("Ċ", "d", "<|im_end|>"), Chat("auto", {"enable_thinking": False})
    found = run(target, [talk("one", "x", "two")], tmp_path / "r.jsonl", off)
    closed = "<think>\n\n</think>\n\n"
    assert plain(found) == rows(target.tokenizer, (FIRST + closed, "d<|im_end|>"), (PAST + closed, "d<|im_end|>"))
    header = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
    assert header["chat"] == "auto" and header["chat_template_kwargs"] == {"enable_thinking": False}


def test_without_thoughts_the_conversation_stays_one_row(tmp_path):
    target = qwen("Ċ", "d", "<|im_end|>")
    found = run(target, [talk("one", "x", "two")], tmp_path / "r.jsonl")
    more = f"\n<|im_start|>user\ntwo<|im_end|>\n{HEADER}"
    assert plain(found) == rows(target.tokenizer, (FIRST, "d<|im_end|>", more, "d<|im_end|>"))
    assert "chat_template_kwargs" not in json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])


def test_a_system_message_that_moves_makes_rows_too(tmp_path):
    tokenizer = f.MISTRAL.tokenizer(f.MISTRAL3)
    target = table_target(tokenizer, ("[/INST]", "d", "</s>"))
    found = run(target, [talk("one", "x", "two", system="S")], tmp_path / "r.jsonl")
    second = "<s>[INST]one[/INST]d</s>[INST]S\n\ntwo[/INST]"
    assert plain(found) == rows(tokenizer, ("<s>[INST]S\n\none[/INST]", "d</s>"), (second, "d</s>"))


def test_r1_opens_the_thought_itself(tmp_path):
    tokenizer = f.DEEPSEEKS.tokenizer(f.R1)
    end = "<｜end▁of▁sentence｜>"
    target = table_target(tokenizer, ("Ċ", "p", "</think>", "d", end))
    found = run(target, [talk("one", "x", "two")], tmp_path / "r.jsonl")
    first = "<｜begin▁of▁sentence｜><｜User｜>one<｜Assistant｜>"
    second = f"{first}d{end}<｜User｜>two<｜Assistant｜><think>\n"
    answer = f"p</think>d{end}"
    assert plain(found) == rows(tokenizer, (first + "<think>\n", answer), (second, answer))


def test_harmony_forgets_the_analysis_and_ends_the_past_with_another_token():
    tokenizer = f.GPT_OSS.tokenizer(f.HARMONY)
    target, chat = table_target(tokenizer, ("t", "<|return|>")), Chat()
    conversation = talk("one", "x", "two", system="S")
    talked = Talk(0, 0.0, asked_of(conversation, target, chat))
    send(talked, target, chat, "f:1")
    answer = "<|channel|>analysis<|message|>p<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>"
    talked.answered(by_hand(tokenizer, answer)[0], "stop", target)
    assert goes_on(talked, target, chat, 999, "f:1")
    talked.answered(by_hand(tokenizer, answer)[0], "stop", target)
    assert not goes_on(talked, target, chat, 999, "f:1")
    head = "<|start|>system<|message|>Reasoning: medium<|end|><|start|>developer<|message|># Instructions\n\nS<|end|>"
    head += "<|start|>user<|message|>one<|end|><|start|>assistant"
    past = head + "<|channel|>final<|message|>d<|end|><|start|>user<|message|>two<|end|><|start|>assistant"
    found = encoded_of(json.loads(json.dumps(line_of(talked))), conversation)
    assert plain(found) == rows(tokenizer, (head, answer), (past, answer))
    talked = Talk(0, 0.0, asked_of(conversation, target, chat))
    send(talked, target, chat, "f:1")
    call = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    talked.answered(by_hand(tokenizer, call)[0], "stop", target)
    assert not goes_on(talked, target, chat, 999, "f:1")  # What the call returns is not known.


def test_a_turn_without_room_leaves_the_earlier_rows(tmp_path):
    target = qwen()
    room = len(by_hand(target.tokenizer, FIRST, "<think>p</think>d<|im_end|>")[0]) + 3
    options = {"chat": "auto", "max_length": room}
    found = regenerate(target, [talk("one", "x", "two")], RegenerateConfig(), tmp_path / "r.jsonl", **options)
    assert plain(found) == rows(target.tokenizer, (FIRST, "<think>p</think>d<|im_end|>"))


# Tools: one answer, behind the row's own past.


def test_a_conversation_with_tools_is_answered_once_at_a_turn_that_goes_round(tmp_path):
    target = qwen("Ċ", "d", "<|im_end|>")
    conversation = said(*TOOL_TALK, tools=list(f.TOOLS))
    found = run(target, [conversation] * 3, tmp_path / "r.jsonl")
    head = f"<|im_start|>system\n\n# Tools\n{f.TOOLS_TEXT}<|im_end|>\n<|im_start|>user\ntime?<|im_end|>\n{HEADER}"
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    past = (
        f'{head}{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n{{"h": 3}}\n</tool_response><|im_end|>\n{HEADER}'
    )
    first, second = rows(target.tokenizer, (head, "d<|im_end|>"), (past, "d<|im_end|>"))
    assert plain(found) == [first, second, first]
    open_end = said(("user", "time?"), calls(), RESULT)
    assert asked_of(open_end, target, Chat(), 1) == [list(open_end.messages)]


# From a chat endpoint.


class FakeChat(FakeCompletions):
    """Answers each request with the next of `choices` (message, finish, counted tokens)."""

    def answer(self, body):
        message, finish, counted = self.choices[len(self.bodies) - 1]
        choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
        return {"choices": [self.change(choice)], "usage": {"completion_tokens": counted}}


def chat_server(target, *choices, **options):
    server = FakeChat(lambda token: 0, tuple(target.stop_ids), target.tokenizer.decode, **options)
    server.choices = choices
    return server


def ask(target, path, server, conversations, chat="auto", **settings):
    return run(target, conversations, path, chat, server=server.url, endpoint="chat", concurrency=1, **settings)


def test_reasoning_that_comes_apart_is_joined_as_the_template_writes_it(tmp_path):
    target, on = qwen(), Chat("auto", {"enable_thinking": True})
    answer = "<think>\np\n</think>\n\nd<|im_end|>"
    count = len(by_hand(target.tokenizer, answer)[0])
    message = {"content": "d", "reasoning_content": "p", "tool_calls": []}
    with chat_server(target, (message, "stop", count), (message, "stop", count)) as server:
        found = ask(target, tmp_path / "r.jsonl", server, [talk("one", "x", "two", system=None)], on)
    assert plain(found) == rows(target.tokenizer, (FIRST, answer), (PAST, answer))
    assert set(server.paths) == {"/v1/chat/completions"}
    first, second = server.bodies
    assert first["messages"] == [{"role": "user", "content": "one"}] and "prompt" not in first
    assert first["chat_template_kwargs"] == {"enable_thinking": True} and "tools" not in first
    assert [message["content"] for message in second["messages"]] == ["one", "d", "two"]


def test_tool_calls_are_joined_and_the_tools_are_sent(tmp_path):
    target = qwen()
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>'
    message = {
        "content": None,
        "tool_calls": [{"id": "x", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}],
    }
    conversation = said(("user", "time?"), ("assistant", "x"), tools=list(f.TOOLS))
    # With and without the block that the template writes before it, as the count says.
    bare, blocked = (len(by_hand(target.tokenizer, text)[0]) for text in (call, f"<think>\n\n</think>\n\n{call}"))
    choices = ((message, "tool_calls", blocked), (message, "tool_calls", bare))
    with chat_server(target, *choices) as server:
        found = ask(target, tmp_path / "r.jsonl", server, [conversation] * 2)
    assert server.bodies[0]["tools"] == list(f.TOOLS)
    assert [one.dropped for one in found] == [None, CHANGED]
    assert target.tokenizer.decode(found[0].input_ids).endswith(f"{HEADER}<think>\n\n</think>\n\n{call}")


@pytest.mark.parametrize(
    ("message", "finish", "counted", "dropped"),
    [
        ({"content": "d", "reasoning_content": "p"}, "stop", 4, CHANGED),
        ({"content": None, "reasoning_content": "p"}, "length", 4, UNWRITTEN),
        ({"content": 3}, "stop", 4, UNWRITTEN),
        ({"content": [{"type": "image_url"}]}, "stop", 4, UNWRITTEN),
    ],
)
def test_messages_that_are_not_what_the_target_wrote_are_dropped_with_a_count(
    tmp_path, message, finish, counted, dropped
):
    target = qwen()
    good = (
        {"content": "d", "reasoning_content": "p"},
        "stop",
        len(by_hand(target.tokenizer, "<think>\np\n</think>\n\nd")[0]),
    )
    with chat_server(target, (message, finish, counted), good) as server:
        found = ask(target, tmp_path / "r.jsonl", server, [talk("one"), talk("one")])
    assert [one.dropped for one in found] == [dropped, None]
    assert audit(found, target.tokenizer)["dropped"] == {dropped: 1}


def test_r1_cannot_write_a_thought_back(tmp_path):
    target = table_target(f.DEEPSEEKS.tokenizer(f.R1), ("Ċ", "d"))
    message = {"content": "d", "reasoning": "p"}
    with chat_server(target, (message, "stop", None)) as server:
        [found] = ask(target, tmp_path / "r.jsonl", server, [talk("one")])
    assert found.dropped == UNWRITTEN


def test_an_answer_cut_in_its_text_has_no_stop(tmp_path):
    target = qwen()
    with chat_server(target, ({"content": "dd", "reasoning_content": "p"}, "length", None)) as server:
        [found] = ask(target, tmp_path / "r.jsonl", server, [talk("one")])
    assert plain([found]) == rows(target.tokenizer, (FIRST, "<think>\np\n</think>\n\ndd")) and found.open_turns == 1


def test_ids_beside_a_message_are_taken_as_they_are(tmp_path):
    target = qwen()
    written, _ = by_hand(target.tokenizer, "<think>p</think>d<|im_end|>")
    with chat_server(
        target, ({"content": "d"}, "stop", 1), change=lambda choice: choice | {"token_ids": written}
    ) as server:
        [found] = ask(target, tmp_path / "r.jsonl", server, [talk("one")])
    assert plain([found]) == rows(target.tokenizer, (FIRST, "<think>p</think>d<|im_end|>"))
