"""Exact ids and masks of model families' chat templates, written by hand: several turns, system message, tools,
thinking on and off. Runs of text alternate: what the target was given, what it produced.
"""

import pytest

from drafttrain.data.chat import encode, prompt_ids
from drafttrain.data.chat_template import Chat
from drafttrain.data.conversations import Conversation, parse_row
from tests.data import chat_families as f
from tests.data.chat_tokenizers import CHATML, by_hand, talk

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
ASSISTANT = "<|im_start|>assistant\n"


def said(*messages, tools=None):
    """A conversation from (role, content) or whole messages, as a row of a file is read."""
    turns = [{"role": m[0], "content": m[1]} if isinstance(m, tuple) else m for m in messages]
    return parse_row({"messages": turns, "tools": tools}, "auto", "f.jsonl:1")


def thought(reasoning, content, key="reasoning_content"):
    return {"role": "assistant", "content": content, key: reasoning}


def calls(content=None, arguments=None, **more):
    function = CALL["function"] | ({} if arguments is None else {"arguments": arguments})
    return {"role": "assistant", "content": content, "tool_calls": [CALL | {"function": function}], **more}


RESULT = {"role": "tool", "content": '{"h": 3}', "tool_call_id": "abcdefghi"}
TOOL_TALK = (("user", "time?"), calls(), RESULT, ("assistant", "three"))


def run(family, template, conversation, **switches):
    tokenizer = family.tokenizer(template)
    chat, stops = Chat("template", switches), family.stop_ids(tokenizer)
    return encode(conversation, tokenizer, chat=chat, max_length=10_000, stop_ids=stops), tokenizer


def check(family, template, conversation, *runs, open_turns=0, **switches):
    """The whole conversation by hand; every prefix before an answer is the prompt, and BOS stands there once."""
    found, tokenizer = run(family, template, conversation, **switches)
    ids, mask = by_hand(tokenizer, *runs)
    assert (found.dropped, found.open_turns) == (None, open_turns)
    assert (found.input_ids, found.loss_mask) == (ids, mask)
    assert found.input_ids.count(tokenizer.bos_token_id) == int(family.adds_bos)
    return found


# Plain turns.


def test_chatml():
    runs = ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n" + ASSISTANT, "b<|im_end|>")
    runs += (f"\n<|im_start|>user\nc<|im_end|>\n{ASSISTANT}", "d<|im_end|>", "\n")
    check(f.QWEN, CHATML, talk("a", "b", "c", "d", system="S"), *runs)


def test_phi4():
    turn = "<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>".format
    given, more = "<|im_start|>system<|im_sep|>S<|im_end|>" + turn("a"), turn("c")
    check(f.PHI, f.PHI4, talk("a", "b", "c", "d", system="S"), given, "b<|im_end|>", more, "d<|im_end|>")


def test_llama31():
    head = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    given = f"<|begin_of_text|>{head('system')}S<|eot_id|>{head('user')}a<|eot_id|>{head('assistant')}"
    more = f"{head('user')}c<|eot_id|>{head('assistant')}"
    check(f.LLAMA, f.LLAMA31, talk(" a ", " b ", "c", "d", system="S"), given, "b<|eot_id|>", more, "d<|eot_id|>")


def test_gemma2_has_no_system_role_and_the_row_is_dropped():
    turn = "<start_of_turn>{}\n".format
    runs = (f"<bos>{turn('user')}a<end_of_turn>\n{turn('model')}", "b<end_of_turn>")
    runs += (f"\n{turn('user')}c<end_of_turn>\n{turn('model')}", "d<end_of_turn>", "\n")
    check(f.GEMMA, f.GEMMA2, talk("a", "b", "c", "d"), *runs)
    found, _ = run(f.GEMMA, f.GEMMA2, talk("a", "b", system="S"))
    assert found.dropped == "the chat template refuses the conversation (System role not supported)"


def test_mistral_v3_moves_the_system_message_to_the_last_turn():
    conversation = talk("a", "b", "c", "d", system="S")
    check(f.MISTRAL, f.MISTRAL3, conversation, "<s>[INST]a[/INST]", "b</s>", "[INST]S\n\nc[/INST]", "d</s>")


def test_mistral_v7_keeps_it_in_front():
    conversation = talk("a", "b", "c", "d", system="S")
    given = "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a[/INST]"
    check(f.MISTRAL, f.MISTRAL7, conversation, given, "b</s>", "[INST]c[/INST]", "d</s>")


def test_deepseek_v3():
    given = "<｜begin▁of▁sentence｜>S<｜User｜>a<｜Assistant｜>"
    runs = (given, "b<｜end▁of▁sentence｜>", "<｜User｜>c<｜Assistant｜>", "d<｜end▁of▁sentence｜>")
    check(f.DEEPSEEKS, f.DEEPSEEK3, talk("a", "b", "c", "d", system="S"), *runs)


# Harmony.

SYSTEM = "<|start|>system<|message|>Reasoning: medium<|end|>"
FINAL = "<|channel|>final<|message|>"


def test_harmony_writes_channels_itself_and_only_the_last_answer_returns():
    conversation = said(("developer", "D"), ("user", "a"), thought("p", "b"), ("user", "c"), thought("q", "d"))
    given = SYSTEM + "<|start|>developer<|message|># Instructions\n\nD<|end|><|start|>user<|message|>a<|end|>"
    check(
        f.GPT_OSS,
        f.HARMONY,
        conversation,
        f"{given}<|start|>assistant",
        f"{FINAL}b",  # Its reasoning is forgotten; the target wrote <|return|> where <|end|> stands now.
        "<|end|><|start|>user<|message|>c<|end|><|start|>assistant",
        f"<|channel|>analysis<|message|>q<|end|><|start|>assistant{FINAL}d<|return|>",
        open_turns=1,
    )


def test_harmony_without_reasoning_and_with_another_effort():
    given = "<|start|>system<|message|>Reasoning: high<|end|><|start|>user<|message|>a<|end|><|start|>assistant"
    check(f.GPT_OSS, f.HARMONY, talk("a", "b"), given, f"{FINAL}b<|return|>", reasoning_effort="high")


def test_harmony_calls_a_tool():
    call = ' to=functions.now<|channel|>commentary json<|message|>{"zone": "UTC"}<|call|>'
    result = '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"{\\"h\\": 3}"<|end|>'
    given = f"{SYSTEM}<|start|>user<|message|>time?<|end|><|start|>assistant"
    check(
        f.GPT_OSS,
        f.HARMONY,
        said(("user", "time?"), calls(thinking="p"), RESULT, thought("q", "three", "thinking")),
        given,
        call,
        result + "<|start|>assistant",
        f"<|channel|>analysis<|message|>q<|end|><|start|>assistant{FINAL}three<|return|>",
    )
    # Before the final answer the thought that led to the call is still there.
    thought_of = "<|channel|>analysis<|message|>p<|end|><|start|>assistant" + call
    check(f.GPT_OSS, f.HARMONY, said(("user", "time?"), calls(thinking="p"), RESULT), given, thought_of, result)


# Thinking.


def test_qwen3_keeps_the_last_thought_alone():
    first, last = f"<|im_start|>user\na<|im_end|>\n{ASSISTANT}", f"\n<|im_start|>user\nc<|im_end|>\n{ASSISTANT}"
    runs = (first, "b<|im_end|>", last, "<think>\nq\n</think>\n\nd<|im_end|>", "\n")
    conversation = said(("user", "a"), thought("p", "b"), ("user", "c"), thought("q", "d"))
    check(f.QWEN, f.QWEN3, conversation, *runs)
    inline = talk("a", "<think>\np\n</think>\n\nb", "c", "<think>\nq\n</think>\n\nd")
    check(f.QWEN, f.QWEN3, inline, *runs)
    for key in ("reasoning", "thinking"):
        check(f.QWEN, f.QWEN3, said(("user", "a"), ("assistant", "b"), ("user", "c"), thought("q", "d", key)), *runs)


@pytest.mark.parametrize("switches", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_qwen3_empty_think_block_is_given(switches):
    given = f"<|im_start|>user\na<|im_end|>\n{ASSISTANT}<think>\n\n</think>\n\n"
    found = check(f.QWEN, f.QWEN3, talk("a", "b"), given, "b<|im_end|>", "\n", **switches)
    tokenizer = f.QWEN.tokenizer(f.QWEN3)
    prompt = prompt_ids(talk("a").messages, tokenizer, Chat("auto", switches))
    off = switches.get("enable_thinking") is False
    assert prompt == by_hand(tokenizer, given if off else given.partition("<think>")[0])[0]
    assert found.input_ids[: len(prompt)] == prompt


def test_r1_forgets_every_thought_and_opens_the_next_in_the_prompt():
    runs = ("<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>", "b<｜end▁of▁sentence｜>", "<｜User｜>c<｜Assistant｜>")
    runs += ("d<｜end▁of▁sentence｜>",)
    conversation = said(("user", "a"), thought("p", "b"), ("user", "c"), ("assistant", "<think>q</think>d"))
    check(f.DEEPSEEKS, f.R1, talk("a", "<think>p</think>b", "c", "<think>q</think>d"), *runs)
    check(f.DEEPSEEKS, f.R1, conversation, *runs)
    tokenizer = f.DEEPSEEKS.tokenizer(f.R1)
    prompt = prompt_ids(talk("a").messages, tokenizer, "auto")
    assert prompt == by_hand(tokenizer, "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>\n")[0]


@pytest.mark.parametrize("thinking", [False, True])
def test_deepseek_v31_closes_the_thought_in_the_header(thinking):
    runs = ("<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>", "b<｜end▁of▁sentence｜>")
    runs += ("<｜User｜>c<｜Assistant｜></think>", "d<｜end▁of▁sentence｜>")
    check(f.DEEPSEEKS, f.DEEPSEEK31, talk("a", "b", "c", "d"), *runs, thinking=thinking)
    # Tags of several tokens each: that both begin alike makes no part of one the target's.
    spelled = [text.replace("</think>", "[/THINK]") for text in runs]
    template = f.DEEPSEEK31.replace("think>", "THINK]").replace("<THINK", "[THINK").replace("</THINK", "[/THINK")
    check(f.DEEPSEEKS, template, talk("a", "b", "c", "d"), *spelled, thinking=thinking)


# Tools.

HERMES = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("arguments", [{"zone": "UTC"}, '{"zone": "UTC"}', '{"zone":"UTC"}'])
def test_qwen3_tool_call(arguments):
    turns = (("user", "time?"), calls(arguments=arguments), RESULT, thought("q", "three"))
    conversation = said(("system", "S"), *turns, tools=list(f.TOOLS))
    check(
        f.QWEN,
        f.QWEN3,
        conversation,
        f"<|im_start|>system\nS\n# Tools\n{f.TOOLS_TEXT}<|im_end|>\n<|im_start|>user\ntime?<|im_end|>\n{ASSISTANT}",
        HERMES,
        f'\n<|im_start|>user\n<tool_response>\n{{"h": 3}}\n</tool_response><|im_end|>\n{ASSISTANT}',
        "<think>\nq\n</think>\n\nthree<|im_end|>",
        "\n",
    )


def test_qwen3_thinks_and_talks_before_it_calls_twice():
    twice = calls("look", reasoning_content="p")
    twice["tool_calls"] *= 2
    wanted = f"<think>\np\n</think>\n\nlook\n{HERMES.removesuffix('<|im_end|>')}\n{HERMES}"
    check(f.QWEN, f.QWEN3, said(("user", "a"), twice), f"<|im_start|>user\na<|im_end|>\n{ASSISTANT}", wanted, "\n")


def test_llama31_tool_call():
    head = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    given = f"<|begin_of_text|>{head('system')}Environment: ipython\n<|eot_id|>{head('user')}time?<|eot_id|>"
    check(
        f.LLAMA,
        f.LLAMA31,
        said(*TOOL_TALK, tools=list(f.TOOLS)),
        given + head("assistant"),
        '{"name": "now", "parameters": {"zone": "UTC"}}<|eot_id|>',
        f'{head("ipython")}"{{\\"h\\": 3}}"<|eot_id|>{head("assistant")}',
        "three<|eot_id|>",
    )
    twice = calls()
    twice["tool_calls"] *= 2
    found, _ = run(f.LLAMA, f.LLAMA31, said(("user", "a"), twice))
    assert found.dropped == "the chat template refuses the conversation (one tool call at a time)"


def test_mistral_v3_tool_call_has_no_header_before_it():
    check(
        f.MISTRAL,
        f.MISTRAL3,
        said(*TOOL_TALK, tools=list(f.TOOLS)),
        f"<s>[AVAILABLE_TOOLS][{f.TOOLS_TEXT}][/AVAILABLE_TOOLS][INST]time?[/INST]",
        '[TOOL_CALLS][{"name": "now", "arguments": {"zone": "UTC"}, "id": "abcdefghi"}]</s>',
        '[TOOL_RESULTS]{"content": {"h": 3}, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        "three</s>",
    )
    short = calls()
    short["tool_calls"][0]["id"] = "call_1"
    found, _ = run(f.MISTRAL, f.MISTRAL3, said(("user", "a"), short))
    assert found.dropped == "the chat template refuses the conversation (Tool call IDs have 9 characters)"


def test_mistral_v7_tool_call_with_missing_content():
    check(
        f.MISTRAL,
        f.MISTRAL7,
        said(*TOOL_TALK),
        "<s>[INST]time?[/INST]",
        '[TOOL_CALLS]now[ARGS]{"zone": "UTC"}</s>',  # And not the word None before it.
        '[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]{"h": 3}[/TOOL_RESULTS]',
        "three</s>",
    )


@pytest.mark.parametrize("arguments", [{"zone": "UTC"}, '{"zone": "UTC"}'])
def test_deepseek_tool_call_takes_arguments_as_text(arguments):
    call = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{"zone": "UTC"}\n```'
    check(
        f.DEEPSEEKS,
        f.DEEPSEEK3,
        said(("user", "time?"), calls(arguments=arguments), RESULT, ("assistant", "three")),
        "<｜begin▁of▁sentence｜><｜User｜>time?<｜Assistant｜>",
        call + "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{"h": 3}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>',
        "three<｜end▁of▁sentence｜>",
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML.replace("m.content", "(m.content or '')"), "the chat template does not write tool calls"),
        (f.MISTRAL7.replace("{{- eos_token }}", ""), "no stop token of the target ends a tool call"),
        ("{% for m in messages %}{{ m.content is none }}{% endfor %}", "the chat template does not write tool calls"),
    ],
)
def test_tool_calls_that_cannot_be_told_drop_the_row(template, reason):
    assert run(f.MISTRAL, template, said(*TOOL_TALK))[0].dropped == reason


def test_generation_marks_decide_over_tool_calls():
    template = f.MISTRAL7.replace("{{- m.content }}", "{% generation %}{{- m.content or '' }}").replace(
        "{{- eos_token }}", "{{- eos_token }}{% endgeneration %}"
    )
    runs = ("<s>[INST]time?[/INST]", '[TOOL_CALLS]now[ARGS]{"zone": "UTC"}</s>')
    runs += ('[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]{"h": 3}[/TOOL_RESULTS]', "three</s>")
    check(f.MISTRAL, template, said(*TOOL_TALK), *runs)


# A template that does not honour add_generation_prompt.


def test_header_that_no_generation_prompt_writes_is_not_supervised():
    template = CHATML.partition("{% if add_generation_prompt")[0]
    given = f"<|im_start|>user\na<|im_end|>\n{ASSISTANT}"
    check(f.QWEN, template, talk("a", "b"), given, "b<|im_end|>", "\n")


def test_prompts_end_where_answers_begin():
    for family, template, conversation in [
        (f.QWEN, f.QWEN3, said(("user", "time?"), calls(), RESULT, thought("q", "three"), tools=list(f.TOOLS))),
        (f.LLAMA, f.LLAMA31, said(*TOOL_TALK, tools=list(f.TOOLS))),
        (f.MISTRAL, f.MISTRAL3, said(*TOOL_TALK, tools=list(f.TOOLS))),
        (f.DEEPSEEKS, f.DEEPSEEK3, said(*TOOL_TALK)),
        (f.GPT_OSS, f.HARMONY, said(("user", "time?"), calls(), RESULT, thought("q", "three"))),
    ]:
        found, tokenizer = run(family, template, conversation)
        prompt = prompt_ids(conversation.messages[:-1], tokenizer, "auto", conversation.tools)
        assert found.input_ids[: len(prompt)] == prompt
        assert found.loss_mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_a_pair_has_no_tools():
    assert not Conversation(prompt="a").uses_tools and said(*TOOL_TALK).uses_tools
