"""Regenerated answers against ids written by hand (the target is a table of next tokens) and transformers' generate."""

import json

import pytest
import torch

from drafttrain.data.chat import continuation_ids, encode, prompt_ids
from drafttrain.data.conversations import Conversation, DataError
from drafttrain.data.regenerate import TOO_LONG, regenerate
from drafttrain.recipe import RegenerateConfig
from drafttrain.target import Target
from tests.data.chat_tokenizers import CHATML, GEMMA, LLAMA2, LLAMA3, QWEN3, by_hand, make_tokenizer, stops, talk
from tests.tiny_models import make_model

HEADER = "<|im_start|>assistant\n"


def table_target(tokenizer, *chains):
    """A target whose next token depends on the last one alone: each chain lists tokens that follow one another."""
    size = len(tokenizer)
    model = make_model("Llama", vocab_size=size, hidden_size=-(-size // 4) * 4, max_position_embeddings=512)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size, model.config.hidden_size))
        model.lm_head.weight.zero_()
        for chain in chains:
            ids = [tokenizer.get_vocab()[token] for token in chain]
            model.lm_head.weight[ids[1:], ids[:-1]] = 1.0
    return Target.from_model(model, tokenizer)


def random_target(tokenizer, positions=512, stop_every=9):
    """A tiny random Llama that ends its answers after some tokens, because every ninth id is a stop."""
    model = make_model("Llama", vocab_size=len(tokenizer), max_position_embeddings=positions)
    model.generation_config.eos_token_id = list(range(5, len(tokenizer), stop_every))
    return Target.from_model(model, tokenizer)


def run(target, conversations, path, chat="auto", max_length=512, progress=None, **settings):
    return regenerate(
        target, conversations, RegenerateConfig(**settings), path, chat=chat, max_length=max_length, progress=progress
    )


def plain(encoded):
    return [(one.input_ids, one.loss_mask, one.dropped, one.open_turns) for one in encoded]


# Ids by hand.


@pytest.mark.parametrize(
    ("template", "chain", "runs"),
    [
        (
            CHATML,
            ("Ċ", "H", "i", "<|im_end|>"),
            (
                f"<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\none<|im_end|>\n{HEADER}",
                "Hi<|im_end|>",
                f"\n<|im_start|>user\ntwo<|im_end|>\n{HEADER}",
                "Hi<|im_end|>",
            ),
        ),
        (
            QWEN3,
            ("Ċ", "H", "i", "<|im_end|>"),
            (
                f"<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\none<|im_end|>\n{HEADER}",
                "Hi<|im_end|>",
                f"\n<|im_start|>user\ntwo<|im_end|>\n{HEADER}",
                "Hi<|im_end|>",
            ),
        ),
        (
            GEMMA,
            ("Ċ", "H", "i", "<end_of_turn>"),
            (
                "<bos><start_of_turn>user\nBe brief\n\none<end_of_turn>\n<start_of_turn>model\n",
                "Hi<end_of_turn>",
                "\n<start_of_turn>user\ntwo<end_of_turn>\n<start_of_turn>model\n",
                "Hi<end_of_turn>",
            ),
        ),
        (
            LLAMA3,
            ("Ċ", "H", "i", "<|eot_id|>"),
            (
                "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                "Hi<|eot_id|>",
                "<|start_header_id|>user<|end_header_id|>\n\ntwo<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                "Hi<|eot_id|>",
            ),
        ),
    ],
)
def test_two_turns_by_hand(tmp_path, template, chain, runs):
    tokenizer = make_tokenizer(template)
    conversation = talk("one", "what the data says", "two", "ignored", system="Be brief")
    [found] = run(table_target(tokenizer, chain), [conversation], tmp_path / "r.jsonl")
    assert (found.input_ids, found.loss_mask) == by_hand(tokenizer, *runs)
    assert (found.dropped, found.open_turns, found.source) == (None, 0, "f.jsonl:1")
    # The same conversation as data: the ids agree up to what the template puts behind the last answer.
    told = encode(
        talk("one", "Hi", "two", "Hi", system="Be brief"),
        tokenizer,
        chat="auto",
        max_length=512,
        stop_ids=stops(tokenizer),
    )
    end = len(found.input_ids)
    if template != QWEN3:  # It writes an empty think block before the last answer of a finished conversation.
        assert (told.input_ids[:end], told.loss_mask[:end]) == (found.input_ids, found.loss_mask)


def test_the_closing_of_an_answer_is_left_out_with_the_space_before_it(tmp_path):
    tokenizer = make_tokenizer(LLAMA2)
    [found] = run(table_target(tokenizer, ("]", "H", "i", "</s>")), [talk("one", "x", "two")], tmp_path / "r.jsonl")
    runs = ("<bos>[INST] one [/INST]", "Hi</s>", "<bos>[INST] two [/INST]", "Hi</s>")
    assert (found.input_ids, found.loss_mask) == by_hand(tokenizer, *runs)


def test_an_answer_that_ends_with_another_stop_keeps_the_template_s_own_closing(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    [found] = run(table_target(tokenizer, ("Ċ", "H", "</s>")), [talk("one", "x", "two")], tmp_path / "r.jsonl")
    head, between = (
        f"<|im_start|>user\none<|im_end|>\n{HEADER}",
        f"<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n{HEADER}",
    )
    assert (found.input_ids, found.loss_mask) == by_hand(tokenizer, head, "H</s>", between, "H</s>")


def test_an_answer_cut_by_max_new_tokens_ends_its_conversation(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    target = table_target(tokenizer, ("Ċ", "a", "b", "a"))
    [found] = run(target, [talk("one", "x", "two", "y")], tmp_path / "r.jsonl", max_new_tokens=5)
    assert (found.input_ids, found.loss_mask) == by_hand(
        tokenizer, f"<|im_start|>user\none<|im_end|>\n{HEADER}", "ababa"
    )
    assert found.open_turns == 1


def test_prompt_rows_are_continued_without_a_template_and_their_completion_is_ignored(tmp_path):
    tokenizer = make_tokenizer()
    target = table_target(tokenizer, ("x", "y", "z", "</s>"))
    rows = [Conversation(prompt="say x", completion="no", source="f:1"), Conversation(prompt="x", source="f:2")]
    first, second = run(target, rows, tmp_path / "r.jsonl", chat="none")
    assert (first.input_ids, first.loss_mask) == by_hand(tokenizer, "<bos>say x", "yz</s>")
    assert (second.input_ids, second.loss_mask, second.source) == (*by_hand(tokenizer, "<bos>x", "yz</s>"), "f:2")


def test_prompt_rows_go_through_the_template_where_there_is_one(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    [found] = run(table_target(tokenizer, ("Ċ", "H", "</s>")), [Conversation(prompt="one")], tmp_path / "r.jsonl")
    head = f"<|im_start|>user\none<|im_end|>\n{HEADER}"
    assert (found.input_ids, found.loss_mask) == by_hand(tokenizer, head, "H</s>")


# Against transformers, and whatever the batches.

TALKS = [
    *(talk("hello " * i, "x", "and then? " * (i % 3), "y", "so?") for i in range(1, 6)),
    *(talk(f"number {i}") for i in range(4)),
]


def test_every_answer_is_what_transformers_generates_after_the_ids_before_it(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    target = random_target(tokenizer)
    found = run(target, TALKS, tmp_path / "r.jsonl", max_new_tokens=20, batch_size=4)
    answers = 0
    for conversation, one in zip(TALKS, found, strict=True):
        ids, mask = one.input_ids, one.loss_mask
        assert ids[: mask.index(1)] == prompt_ids([conversation.messages[0]], tokenizer, "auto")
        starts = [p for p in range(1, len(ids)) if mask[p] > mask[p - 1]]
        for start in starts:
            end = next((p for p in range(start, len(ids)) if not mask[p]), len(ids))
            prefix = torch.tensor([ids[:start]])
            options = {"eos_token_id": list(target.stop_ids), "pad_token_id": 0}
            out = target.model.generate(
                prefix, attention_mask=torch.ones_like(prefix), do_sample=False, max_new_tokens=20, **options
            )
            assert out[0, start:].tolist() == ids[start:end]
        answers += len(starts)
        turns = sum(message["role"] == "user" for message in conversation.messages)
        assert len(starts) == turns or ids[-1] not in target.stop_ids
    assert answers > len(TALKS)


def test_results_do_not_depend_on_the_batches(tmp_path):
    target = random_target(make_tokenizer(CHATML))
    settings = {"temperature": [0.0, 0.7, 1.3], "top_p": 0.9, "max_new_tokens": 16}
    runs = [run(target, TALKS, tmp_path / f"{size}.jsonl", batch_size=size, **settings) for size in (1, 3, 64)]
    assert plain(runs[0]) == plain(runs[1]) == plain(runs[2])
    other = run(target, TALKS, tmp_path / "other.jsonl", **settings, seed=1)
    same = [a.input_ids == b.input_ids for a, b in zip(runs[0], other, strict=True)]
    assert same[::3] == [True] * 3 and not any(same[1::3]) and not any(same[2::3])


def test_turns_and_conversations_draw_from_streams_of_their_own(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    target = random_target(tokenizer, stop_every=1000)
    first, second = run(
        target, [talk("same"), talk("same")], tmp_path / "r.jsonl", temperature=[2.0], max_new_tokens=16
    )
    assert first.input_ids != second.input_ids


# Limits.


def test_max_length_holds_for_prompts_and_answers(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    target = table_target(tokenizer, ("Ċ", "a", "b", "a"))
    length = len(prompt_ids(talk("four").messages, tokenizer, "auto"))
    rows = [talk("four"), talk("fours"), talk("4")]
    found = run(target, rows, tmp_path / "r.jsonl", max_length=length + 1, max_new_tokens=3)
    assert [len(one.input_ids) for one in found] == [length + 1, 0, length]
    assert [sum(one.loss_mask) for one in found] == [1, 0, 3]
    assert [one.dropped for one in found] == [None, TOO_LONG, None]
    assert found[0].open_turns == 1


def test_a_turn_without_room_is_left_out_and_the_answer_before_it_stays(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    target = table_target(tokenizer, ("Ċ", "H", "<|im_end|>"))
    conversation = talk("one", "x", "two", "y")
    [whole] = run(target, [conversation], tmp_path / "whole.jsonl")
    answers = [p for p, m in enumerate(whole.loss_mask) if m]
    [found] = run(target, [conversation], tmp_path / "r.jsonl", max_length=answers[2])
    assert found.input_ids == whole.input_ids[: answers[1] + 1]
    assert (sum(found.loss_mask), found.loss_mask[-1], found.open_turns) == (2, 1, 0)


def test_rows_near_the_last_position_are_not_cut_short_by_longer_neighbours(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    target = random_target(tokenizer, positions=64, stop_every=1000)
    rows = [talk("a" * n) for n in (1, 9, 15, 21, 40, 45)]
    together = run(target, rows, tmp_path / "r.jsonl", max_length=1000, max_new_tokens=30)
    alone = [run(target, [row], tmp_path / f"{i}.jsonl", max_new_tokens=30)[0] for i, row in enumerate(rows)]
    assert plain(together) == plain(alone)
    assert [len(one.input_ids) for one in together] == [50, 58, 64, 64, 64, 0]


# Resuming.


class Stopped(Exception):
    pass


def stop_after(batches):
    calls = []

    def progress(tokens, done):
        calls.append((tokens, done))
        if len(calls) == batches:
            raise Stopped

    return progress


SETTINGS = {"temperature": [0.0, 1.0], "max_new_tokens": 12, "batch_size": 2}


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    target = random_target(make_tokenizer(CHATML))
    seen = []
    whole = run(target, TALKS, tmp_path / "whole.jsonl", **SETTINGS, progress=lambda *values: seen.append(values))
    assert seen == sorted(seen) and seen[-1] == (sum(sum(one.loss_mask) for one in whole), len(TALKS))
    path = tmp_path / "r.jsonl"
    with pytest.raises(Stopped):
        run(target, TALKS, path, **SETTINGS, progress=stop_after(5))
    before = path.read_bytes()
    assert 1 < before.count(b"\n") < 1 + len(TALKS)
    path.write_bytes(before + b'{"index": 3, "input_i')
    assert plain(run(target, TALKS, path, **{**SETTINGS, "batch_size": 3})) == plain(whole)
    after = path.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 1 + len(TALKS)
    assert plain(run(target, TALKS, path, **SETTINGS, progress=stop_after(1))) == plain(whole)
    assert path.read_bytes() == after


def test_a_torn_header_is_a_new_file(tmp_path):
    path = tmp_path / "new" / "r.jsonl"
    path.parent.mkdir()
    path.write_text('{"format": 1, "targ')
    target = random_target(make_tokenizer(CHATML))
    run(target, TALKS[:2], path, **SETTINGS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["count"] == 2 and sorted(line["index"] for line in lines[1:]) == [0, 1]
    assert {line["index"]: line["temperature"] for line in lines[1:]} == {0: 0.0, 1: 1.0}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed 0, now 1"),
        ({"max_new_tokens": 13}, "max_new_tokens 12, now 13"),
        ({"max_length": 100}, "max_length 512, now 100"),
        ({"temperature": [0.0]}, "temperature"),
    ],
)
def test_a_file_of_other_settings_is_refused(tmp_path, change, named):
    target, path = random_target(make_tokenizer(CHATML)), tmp_path / "r.jsonl"
    run(target, TALKS[:2], path, **SETTINGS)
    with pytest.raises(DataError, match=f"(?s)r.jsonl was regenerated with other settings.*{named}.*--fresh"):
        run(target, TALKS[:2], path, **{**SETTINGS, **change})


def test_a_file_of_other_prompts_or_another_target_is_refused(tmp_path):
    target, path = random_target(make_tokenizer(CHATML)), tmp_path / "r.jsonl"
    run(target, TALKS[:2], path, **SETTINGS)
    with pytest.raises(DataError, match="prompts"):
        run(target, [TALKS[0], TALKS[2]], path, **SETTINGS)
    with pytest.raises(DataError, match="target"):
        run(table_target(target.tokenizer, ("a", "b")), TALKS[:2], path, **SETTINGS)
    other_answers = [talk(*(m["content"] for m in TALKS[0].messages[:1]), "z", *("and then? ", "z", "so?")), TALKS[1]]
    assert len(run(target, other_answers, path, **SETTINGS)) == 2


@pytest.mark.parametrize("line", ["{broken", "3", '{"index": 0}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    target, path = random_target(make_tokenizer(CHATML)), tmp_path / "r.jsonl"
    run(target, TALKS[:2], path, **SETTINGS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
    with pytest.raises(DataError, match=r"r\.jsonl:2"):
        run(target, TALKS[:2], path, **SETTINGS)


# Rows that cannot be answered.


def test_rows_without_a_prompt_or_template_are_named(tmp_path):
    target = random_target(make_tokenizer())
    for row, found in [
        (Conversation(text="a", source="f:1"), "f:1: found plain text"),
        (Conversation(input_ids=(1, 2), source="f:1"), "f:1: found token ids"),
        (talk("a", "b", "c"), "f.jsonl:1: messages need a chat template"),
    ]:
        with pytest.raises(DataError, match=found):
            run(target, [row], tmp_path / "r.jsonl")
    assert not (tmp_path / "r.jsonl").exists()


def test_an_empty_prompt_is_named(tmp_path):
    with pytest.raises(DataError, match="f:1: found an empty prompt"):
        run(
            random_target(make_tokenizer(adds_bos=False)), [Conversation(prompt="", source="f:1")], tmp_path / "r.jsonl"
        )


def test_a_row_that_the_template_refuses_is_dropped_and_the_others_are_answered(tmp_path):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    target = table_target(make_tokenizer(refuses + CHATML), ("Ċ", "H", "<|im_end|>"))
    found = run(target, [talk("a", system="s"), talk("a")], tmp_path / "r.jsonl")
    assert [one.dropped for one in found] == ["the chat template refuses the conversation (no system role)", None]
    assert (found[0].input_ids, found[0].source, sum(found[1].loss_mask)) == ([], "f.jsonl:1", 2)


def test_continuation_needs_the_answer_in_the_text():
    tokenizer = make_tokenizer("{{ messages[-1].content }}")
    with pytest.raises(DataError, match="cannot tell the answers"):
        continuation_ids(talk("a", "b", "c").messages, tokenizer, 1)
