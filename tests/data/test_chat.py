"""Token ids and masks against values written out by hand: a tokenizer of one token per byte makes them countable."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data.chat import CUT, NOTHING, Encoded, audit, encode, prompt_ids
from drafttrain.data.conversations import Conversation, DataError
from tests.data.chat_tokenizers import (
    BYTES,
    CHATML,
    GEMMA,
    LLAMA2,
    LLAMA3,
    QWEN3,
    SPECIALS,
    by_hand,
    make_tokenizer,
    mask_runs,
    stops,
    talk,
)


def run(conversation, tokenizer, *, chat="auto", max_length=10_000):
    return encode(conversation, tokenizer, chat=chat, max_length=max_length, stop_ids=stops(tokenizer))


def check(conversation, tokenizer, *runs, **options):
    found = run(conversation, tokenizer, **options)
    assert (found.input_ids, found.loss_mask) == by_hand(tokenizer, *runs)
    assert found.dropped is None and found.open_turns == 0
    return found


# Exact ids and masks.


def test_chatml_by_number():
    found = run(talk("a", "b"), make_tokenizer(CHATML))
    letters = {letter: len(SPECIALS) + BYTES.index(letter) for letter in "abensrtui"}
    user, assistant = [letters[c] for c in "user"], [letters[c] for c in "assistant"]
    newline = len(SPECIALS) + BYTES.index("Ċ")
    start, end = 5, 2
    question = [start, *user, newline, letters["a"], end, newline]
    assert found.input_ids == [*question, start, *assistant, newline, letters["b"], end, newline]
    assert found.loss_mask == [0] * 20 + [1, 1, 0]
    assert found == Encoded(found.input_ids, found.loss_mask, None, "f.jsonl:1", 0)


def test_chatml_with_contents_that_occur_in_headers():
    check(
        talk("assistant", "user", "a", "assistant\n", system="user"),
        make_tokenizer(CHATML),
        "<|im_start|>system\nuser<|im_end|>\n<|im_start|>user\nassistant<|im_end|>\n<|im_start|>assistant\n",
        "user<|im_end|>",
        "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
        "assistant\n<|im_end|>",
        "\n",
    )


def test_untrimmed_white_space_belongs_to_the_answer():
    head = "<|im_start|>user\n hi <|im_end|>\n<|im_start|>assistant\n"
    check(talk(" hi ", "\n  so \n "), make_tokenizer(CHATML), head, "\n  so \n <|im_end|>", "\n")


def test_llama3_trims_and_has_one_bos():
    check(
        talk(" a", "  é\n", "user", "eot"),
        make_tokenizer(LLAMA3),
        "<bos><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "é<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nuser<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "eot<|eot_id|>",
    )


def test_gemma_merges_the_system_message():
    check(
        talk("model", "user\nmodel", system="s"),
        make_tokenizer(GEMMA),
        "<bos><start_of_turn>user\ns\n\nmodel<end_of_turn>\n<start_of_turn>model\n",
        "user\nmodel<end_of_turn>",
        "\n",
    )


def test_qwen3_empty_think_block_is_not_supervised():
    check(
        talk("q", "one", "r", "two"),
        make_tokenizer(QWEN3, adds_bos=False),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
        "one<|im_end|>",
        "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "two<|im_end|>",
        "\n",
    )


@pytest.mark.parametrize("answer", ["<think>\nhm\n</think>\n\nyes", "hm</think>yes", "<think>x<think>hm</think>yes"])
def test_qwen3_written_out_thinking_is_supervised_and_stripped_thinking_is_followed(answer):
    check(
        talk("q", answer, "r", answer),
        make_tokenizer(QWEN3),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
        "yes<|im_end|>",
        "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n",
        "<think>\nhm\n</think>\n\nyes<|im_end|>",
        "\n",
    )


def test_thinking_header_of_the_prompt_is_not_supervised():
    template = QWEN3.replace(
        "{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    )
    head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
    check(talk("q", "<think>hm</think>yes"), make_tokenizer(template), head, "hm\n</think>\n\nyes<|im_end|>", "\n")


def test_thinking_in_a_template_that_knows_none():
    head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = make_tokenizer(CHATML)
    check(talk("q", "<think>hm</think>yes"), tokenizer, head, "<think>hm</think>yes<|im_end|>", "\n")
    check(talk("q", "<think>\n</think>yes"), tokenizer, head + "<think>\n</think>", "yes<|im_end|>", "\n")


def test_thinking_without_an_answer_is_closed():
    head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    answer = "<think>\nhm\n</think>\n\n"
    for template in (CHATML, QWEN3):
        check(talk("q", answer), make_tokenizer(template), head, answer + "<|im_end|>", "\n")


def test_content_that_the_template_rewrites_is_followed():
    template = CHATML.replace("m.content +", "m.content | replace('colour', 'color') +")
    head = "<|im_start|>user\nmy color<|im_end|>\n<|im_start|>assistant\n"
    check(talk("my colour", "colour!"), make_tokenizer(template), head, "color!<|im_end|>", "\n")


def test_stop_after_white_space_and_bos_between_turns():
    check(
        talk("a", "b", "c", "d"),
        make_tokenizer(LLAMA2),
        "<bos>[INST] a [/INST] ",
        "b </s>",
        "<bos>[INST] c [/INST] ",
        "d </s>",
    )


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_token_that_joins_the_answer_to_white_space_after_the_header(trim_offsets):
    tokenizer = make_tokenizer(LLAMA2, merges=60, trim_offsets=trim_offsets)
    found = run(talk("a", "hello world"), tokenizer)
    assert "Ġhello" in tokenizer.get_vocab()
    assert mask_runs(found, tokenizer) == [("<bos>[INST] a [/INST]", False), (" hello world </s>", True)]


def test_system_message_that_moves_to_the_last_user_turn():
    template = (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set last = loop.nextitem is undefined or loop.index >= messages | length - 1 %}"
        "{{ '[INST]' + (system + '\\n\\n' if last else '') + m.content + '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    check(
        talk("a", "b", "c", "d", system="S"),
        make_tokenizer(template),
        "[INST]a[/INST]",
        "b</s>",
        "[INST]S\n\nc[/INST]",
        "d</s>",
    )


@pytest.mark.parametrize(
    "inside", ["{{ m.content }}", "{{ m.content + '<|im_end|>\\n' }}", "{{ m.content + '<|im_end|>' }}"]
)
def test_generation_markers_decide_and_the_stop_is_supervised(inside):
    after = "" if "\\n" in inside else "\\n" if "im_end" in inside else "<|im_end|>\\n"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}" + inside + "{% endgeneration %}" + ("{{ '" + after + "' }}" if after else "") + "{% else %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    )
    check(
        talk("a", "b", "c", "d"),
        make_tokenizer(template),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
        "b<|im_end|>",
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        "d<|im_end|>",
        "\n",
    )


def test_nothing_after_a_stop_inside_an_answer():
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    check(talk("a", "b</s>c"), make_tokenizer(CHATML), head, "b</s>", "c<|im_end|>\n")


def test_doubled_bos_of_a_template_is_removed():
    check(
        talk("a", "b"),
        make_tokenizer("{{ bos_token }}" + GEMMA),
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n",
        "b<end_of_turn>",
        "\n",
    )


# Prompt and completion, text, tokens.


def test_pair_without_template():
    pair = Conversation(prompt="Q: user\nA:", completion=" user", source="f:1")
    check(pair, make_tokenizer(), "<bos>Q: user\nA:", " user</s>")
    check(pair, make_tokenizer(GEMMA), "<bos>Q: user\nA:", " user</s>", chat="none")
    check(pair, make_tokenizer(adds_bos=False), "Q: user\nA:", " user</s>")
    check(Conversation(prompt="<bos>a", completion="b</s>"), make_tokenizer(), "<bos>a", "b</s>")


def test_pair_with_template_equals_messages():
    tokenizer = make_tokenizer(GEMMA)
    pair = run(Conversation(prompt="a", completion="b", source="f.jsonl:1"), tokenizer)
    assert pair == run(talk("a", "b"), tokenizer)


def test_text_and_tokens():
    tokenizer = make_tokenizer()
    check(Conversation(text="a é"), tokenizer, "<bos>", "a é")
    check(Conversation(text="<bos>a"), tokenizer, "<bos>", "a")
    check(Conversation(text="ab"), make_tokenizer(adds_bos=False), "", "ab")
    assert run(Conversation(input_ids=(0, 5, 6)), tokenizer).loss_mask == [0, 1, 1]
    assert run(Conversation(input_ids=(5, 0, 6)), tokenizer).loss_mask == [1, 1, 1]
    assert run(Conversation(input_ids=(0, 5), loss_mask=(1, 0)), tokenizer) == Encoded([0, 5], [1, 0], None, "")


# Cut, dropped, audited.


def test_right_truncation():
    tokenizer = make_tokenizer(CHATML)
    whole = run(talk("a", "bcd"), tokenizer)
    first = whole.loss_mask.index(1)
    cut = run(talk("a", "bcd"), tokenizer, max_length=first + 2)
    assert (cut.input_ids, cut.loss_mask) == (whole.input_ids[: first + 2], whole.loss_mask[: first + 2])
    assert cut.dropped is None
    assert run(talk("a", "bcd"), tokenizer, max_length=first).dropped == CUT == "no supervised token within max_length"


@pytest.mark.parametrize(
    "only", [talk("a"), Conversation(prompt="a"), Conversation(input_ids=(1, 2), loss_mask=(0, 0))]
)
def test_only_prompt_is_dropped(only):
    assert run(only, make_tokenizer(CHATML)).dropped == NOTHING
    if only.prompt:
        assert run(only, make_tokenizer()).dropped == NOTHING


def test_audit_counts():
    tokenizer = make_tokenizer(CHATML.replace("m.content + '<|im_end|>\\n'", "m.content + '\\n'"))
    rows = [
        run(talk("a", "b"), tokenizer),
        run(talk("a"), tokenizer),
        run(Conversation(input_ids=(0, 0, 7)), tokenizer),
    ]
    found = audit(rows, tokenizer)
    tokens = len(rows[0].input_ids) + 3
    assert found == {
        "conversations": 3,
        "dropped": {NOTHING: 1},
        "dropped_first": {NOTHING: "f.jsonl:1"},
        "tokens": tokens,
        "supervised_tokens": 3,
        "supervised_share": 3 / tokens,
        "doubled_bos": 1,
        "unsupervised_stop": 1,
    }


def test_audit_refuses_data_without_supervision():
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(DataError, match="no conversations"):
        audit([], tokenizer)
    with pytest.raises(DataError, match="every token is masked: the rows hold prompts without answers"):
        audit([run(talk("a"), tokenizer)], tokenizer)
    with pytest.raises(DataError, match="masked: 1 of 2 answers begin after the cut; raise"):
        audit([run(talk("a"), tokenizer), run(talk("a", "b"), tokenizer, max_length=3)], tokenizer)


# Prompts for serving.


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, LLAMA2])
def test_prompt_is_what_stands_before_the_answer(template):
    tokenizer = make_tokenizer(template)
    conversation = talk("a", "b", "c", "d")
    whole = run(conversation, tokenizer)
    prompt = prompt_ids(conversation.messages[:3], tokenizer, "auto")
    assert whole.input_ids[: len(prompt)] == prompt
    assert tokenizer.decode(whole.input_ids[len(prompt) :]).strip().startswith("d")


def test_prompt_without_template():
    tokenizer = make_tokenizer()
    user = [{"role": "user", "content": "a b"}]
    assert prompt_ids(user, tokenizer, "auto") == by_hand(tokenizer, "<bos>a b")[0]
    assert prompt_ids(user, make_tokenizer(GEMMA), "none") == by_hand(tokenizer, "<bos>a b")[0]
    with pytest.raises(DataError, match="the tokenizer has none"):
        prompt_ids(user, tokenizer, "template")
    with pytest.raises(DataError, match="the tokenizer has none"):
        prompt_ids(talk("a", "b", "c").messages, tokenizer, "auto")
    with pytest.raises(DataError, match="last turn is not the user's"):
        prompt_ids(talk("a", "b").messages, tokenizer, "auto")


# Errors.


@pytest.mark.parametrize(
    ("template", "chat", "conversation", "message"),
    [
        (None, "auto", talk("a", "b"), "f.jsonl:1: .*the tokenizer has none"),
        (None, "template", Conversation(prompt="a", completion="b", source="p:2"), "p:2: .*the tokenizer has none"),
        (CHATML, "none", talk("a", "b"), "f.jsonl:1: .*data.chat is none"),
    ],
)
def test_errors_name_row_and_mend(template, chat, conversation, message):
    with pytest.raises(DataError, match=message):
        run(conversation, make_tokenizer(template), chat=chat)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template refuses the conversation (no system role)"),
        ("{{ messages[0].parts[0] }}", "the chat template refuses the conversation ('dict object' has no attribute"),
        ("{{ messages[0].content + 1 }}", "the chat template refuses the conversation (can only concatenate str"),
        ("{% for m in messages %}{{ m.role }}: ...\n{% endfor %}", "the chat template renders an answer 0 times"),
        (CHATML + "{{ messages[-1].content }}", "the chat template renders an answer 2 times"),
        ("{{ messages[0].content | length }}" + CHATML, "cannot tell the answers from the template's own text"),
    ],
)
def test_a_row_that_the_template_does_not_take_is_dropped_with_a_reason_and_named(template, reason):
    tokenizer = make_tokenizer(template)
    found = run(talk("a", "b"), tokenizer)
    assert found.dropped.startswith(reason) and (found.input_ids, found.loss_mask) == ([], [])
    kept = run(Conversation(input_ids=(1, 2), source="f:2"), tokenizer)
    facts = audit([kept, found, found], tokenizer)
    assert facts["dropped"] == {found.dropped: 2} and facts["dropped_first"] == {found.dropped: "f.jsonl:1"}
    with pytest.raises(DataError, match="every token is masked: 1 of 1 rows are dropped: .*such as f.jsonl:1"):
        audit([found], tokenizer)


# Any contents.

WORDS = [
    "user",
    "assistant",
    "model",
    "a",
    "hello",
    " ",
    "\n",
    "<think>",
    "zqx",
    "zqx0az",
    "[/INST]",
    "é",
    "日",
    ":",
    "</s",
]
CONTENT = st.lists(st.sampled_from(WORDS) | st.text("ab \n\t", max_size=3), max_size=5).map("".join)
SPOKEN = CONTENT.filter(str.strip)
TOKENIZERS = {merges: make_tokenizer(merges=merges) for merges in (0, 80)}
TEMPLATES = [(CHATML, "<|im_end|>", False), (LLAMA3, "<|eot_id|>", True), (GEMMA, "<end_of_turn>", True)]


@settings(max_examples=150, deadline=None)
@given(
    contents=st.lists(SPOKEN, min_size=2, max_size=6),
    system=st.none() | SPOKEN,
    chosen=st.sampled_from([*TEMPLATES, (QWEN3, "<|im_end|>", False)]),
    merges=st.sampled_from(sorted(TOKENIZERS)),
)
def test_supervised_text_is_the_answers_and_their_stops(contents, system, chosen, merges):
    template, stop, trims = chosen
    tokenizer = TOKENIZERS[merges]
    tokenizer.chat_template = template
    found = run(talk(*contents, system=system), tokenizer)
    answers = [content.strip() if trims else content for content in contents[1::2]]
    if template == QWEN3 and len(contents) % 2 == 0:
        answers[-1] = answers[-1].lstrip("\n")
    supervised = [text for text, is_supervised in mask_runs(found, tokenizer) if is_supervised]
    if merges:  # white space at an answer's start may merge with the header's, and is then the prompt's
        assert [text.lstrip() for text in supervised] == [(answer + stop).lstrip() for answer in answers]
    else:
        assert supervised == [answer + stop for answer in answers]
    bos = tokenizer.bos_token_id
    assert found.input_ids.count(bos) == int("bos_token" in template)
    assert found.open_turns == 0
