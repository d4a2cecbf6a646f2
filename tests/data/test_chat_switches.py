"""Switches of the chat template, from the recipe to training data, prompts and reports, and what tells them apart."""

import json

import pytest

from drafttrain.data.chat import encode, prompt_ids
from drafttrain.data.chat_template import Chat, Rendering, chat_facts, names_read
from drafttrain.data.conversations import Conversation, DataError
from drafttrain.data.prepare import conversation_prompt, prepare
from drafttrain.evaluate.prompt_sets import PromptRow, load_prompt_set, prompt_tokens
from drafttrain.evaluate.run import asked_otherwise, evaluate_draft, gather_prompts, load_prompts
from drafttrain.recipe import DataEntry, RecipeError, parse_recipe
from drafttrain.target import load_target
from drafttrain.training.run import train
from tests.data import chat_families as f
from tests.data.chat_tokenizers import CHATML, LLAMA3, by_hand, make_tokenizer, talk
from tests.data.test_chat_families import said
from tests.tiny_models import make_model, save
from tests.training.tiny_run import make_target, open_run, settings, write_rows

ON, OFF = Chat("auto", {"enable_thinking": True}), Chat("auto", {"enable_thinking": False})
EMPTY = "<think>\n\n</think>\n\n"
HEADER = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target on disk whose tokenizer has a Qwen3-like template."""
    path = tmp_path_factory.mktemp("thinking")
    tokenizer = f.QWEN.tokenizer(f.QWEN3)
    save(path / "target", make_model("Llama", vocab_size=len(tokenizer) + 2, max_position_embeddings=128), tokenizer)
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    for split in ("train", "validation", "test"):
        write_rows(path / f"{split}.jsonl", [row] * 4)
    return path


def recipe_of(folder, **data):
    values = settings(folder, num_train_epochs=1, eval_steps=2, acceptance_prompts=1, acceptance_new_tokens=2)
    values["data"] |= {"draft_vocab": 40, **data}
    values["evaluation"] |= {"k": [1], "max_new_tokens": 2, "num_prompts": 1, "ngram": False, "untrained": False}
    return parse_recipe(values, folder)


# Passing them on.


def test_the_switch_reaches_masks_and_prompts():
    tokenizer = f.QWEN.tokenizer(f.QWEN3)
    user = talk("a").messages
    asked = by_hand(tokenizer, f"<|im_start|>user\na{HEADER}")[0]
    assert prompt_ids(user, tokenizer, ON) == asked
    assert prompt_ids(user, tokenizer, OFF) == asked + by_hand(tokenizer, EMPTY)[0]
    assert prompt_ids(user, tokenizer, "auto") == asked
    row = PromptRow("p", None, user, None, ("c",))
    target = type("T", (), {"tokenizer": tokenizer, "stop_ids": f.QWEN.stop_ids(tokenizer)})
    later = f"<|im_start|>user\na{HEADER}b<|im_end|>\n<|im_start|>user\nc{HEADER}"
    assert prompt_tokens(row, target, OFF, ["b"]) == by_hand(tokenizer, later + EMPTY)[0]
    written, _ = by_hand(tokenizer, "<think>\np\n</think>\n\nb<|im_end|>")
    assert prompt_tokens(row, target, ON, [written]) == by_hand(tokenizer, later)[0]


def test_tools_of_a_row_reach_the_prompt(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": f.TOOLS}
    path = write_rows(tmp_path / "p.jsonl", [row])
    target = type("T", (), {"tokenizer": f.QWEN.tokenizer(f.QWEN3)})
    expected, _ = by_hand(
        target.tokenizer, f"<|im_start|>system\n\n# Tools\n{f.TOOLS_TEXT}<|im_end|>\n<|im_start|>user\na{HEADER}"
    )
    [prompt] = load_prompts([DataEntry(path=str(path))], target, "auto", 9, 0)
    assert list(prompt.ids) == expected
    [one] = load_prompt_set(path)
    assert prompt_tokens(one, target, "auto") == expected and one.turns == ()


def test_prompts_that_the_template_refuses_are_left_out_and_counted(tmp_path):
    rows = [{"messages": list(talk("a", system="S").messages)}, {"messages": list(talk("b").messages)}]
    path, target = write_rows(tmp_path / "p.jsonl", rows), type("T", (), {"tokenizer": f.GEMMA.tokenizer(f.GEMMA2)})
    said_ = []
    [prompt] = load_prompts([DataEntry(path=str(path))], target, "auto", 9, 0, said_.append)
    assert (
        list(prompt.ids)
        == by_hand(target.tokenizer, "<bos><start_of_turn>user\nb<end_of_turn>\n<start_of_turn>model\n")[0]
    )
    assert len(said_) == 1 and "left out: 1 prompts" in said_[0] and "p.jsonl:1" in said_[0]
    with pytest.raises(DataError, match="p.jsonl:1: .*System role not supported"):
        load_prompts([DataEntry(path=str(path))], target, "auto", 1, 0, said_.append)


def test_names_that_a_template_reads():
    assert names_read(f.QWEN3) == {"reasoning_content", "think tags"}
    assert names_read(f.HARMONY) == {"thinking", "developer"}
    assert names_read(f.R1) == {"think tags"} and names_read(LLAMA3) == set()
    assert names_read("{{ m['reasoning'] }}{% if thinking %}{% endif %}") == {"reasoning"}


def test_a_thought_reaches_the_template_under_its_own_name_alone():
    row = said(("user", "a"), {"role": "assistant", "content": "b", "reasoning": "p"}).messages
    for template, shown in [
        ("{{ messages[1].thinking }}", "p"),
        ("{{ messages[1]['reasoning'] }}", "p"),
        ("{{ messages[1].content }}{# </think> #}", "<think>\np\n</think>b"),
        ("{{ messages[1].content }}", "b"),
    ]:
        assert Rendering(row, make_tokenizer(template), Chat(), "f:1").text == shown


# Switches that do nothing.


def test_a_switch_that_the_template_does_not_read_is_an_error():
    for chat, tokenizer, message in [
        (
            OFF,
            make_tokenizer(CHATML),
            "data.chat_template_kwargs.enable_thinking: .* reads no enable_thinking; it reads",
        ),
        (
            Chat("auto", {"enable_thinkin": False}),
            f.QWEN.tokenizer(f.QWEN3),
            "reads no enable_thinkin; expected some of enable_thinking$",
        ),
        (Chat("auto", {"enable_thinking": True}), f.DEEPSEEKS.tokenizer(f.DEEPSEEK31), "expected some of thinking$"),
    ]:
        with pytest.raises(DataError, match=message):
            encode(talk("a", "b"), tokenizer, chat=chat, max_length=99, stop_ids=(1,))
        with pytest.raises(DataError, match=message):
            prompt_ids(talk("a").messages, tokenizer, chat)
    with pytest.raises(DataError, match="chat_template_kwargs: found .*enable_thinking.* has no chat template"):
        prompt_ids(talk("a").messages, make_tokenizer(), OFF)
    with pytest.raises(DataError, match="chat_template_kwargs: found .* has no chat template"):
        encode(Conversation(prompt="a"), make_tokenizer(), chat=OFF, max_length=99, stop_ids=(1,))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"chat_template_kwargs": {"tools": []}}, "data.chat_template_kwargs: found tools, expected names of the chat"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": True}},
            "chat_template_kwargs: found add_generation_prompt",
        ),
        ({"chat_template_kwargs": {"enable-thinking": True}}, "chat_template_kwargs: found enable-thinking, expected"),
        ({"chat_template_kwargs": "enable_thinking"}, "data.chat_template_kwargs: found 'enable_thinking', expected"),
        ({"chat_template_kwargs": {"x": object()}}, "data.chat_template_kwargs.x.*: found .*expected text .a date"),
        (
            {"chat_template_kwargs": {"x": 1}, "chat": "none"},
            "data: found chat_template_kwargs .* with chat none, expected",
        ),
        ({"chat_template_kwarg": {"x": 1}}, "did you mean data.chat_template_kwargs"),
        ({"enable_thinking": True}, "data.enable_thinking: unknown key .value True.: use data.chat_template_kwargs"),
        ({"chat_template": "x.jinja"}, "data.chat_template: unknown key .*: use the target's own"),
        ({"chat": "thinking"}, "data.chat: found 'thinking', expected 'auto', 'template' or 'none'"),
        ({"regenerate": {"endpoint": "chat"}}, "found endpoint 'chat', expected it beside server"),
        ({"regenerate": {"server": "http://x", "endpoint": "responses"}}, "regenerate.endpoint: found 'responses'"),
    ],
)
def test_wrong_values_name_the_key_in_one_line(tmp_path, data, message):
    values = settings(tmp_path)
    values["data"] |= data
    with pytest.raises(RecipeError, match=message) as caught:
        parse_recipe(values, tmp_path)
    assert len(str(caught.value).splitlines()) == 2  # "is not a valid recipe", and the problem.


# Told apart.


def test_facts_of_a_chat():
    tokenizer = f.QWEN.tokenizer(f.QWEN3)
    assert chat_facts(tokenizer, "auto") == {"mode": "template", "chat_template_kwargs": {}, "header": HEADER}
    off = chat_facts(tokenizer, OFF)
    assert off == {"mode": "template", "chat_template_kwargs": {"enable_thinking": False}, "header": HEADER + EMPTY}
    assert chat_facts(tokenizer, "none") == {"mode": "none", "chat_template_kwargs": {}, "header": None}
    refusing = make_tokenizer("{{ raise_exception('no') }}")
    assert chat_facts(refusing, "auto")["header"] is None


def test_prepared_data_of_other_switches_is_refused(folder, tmp_path):
    recipe = recipe_of(folder, chat_template_kwargs={"enable_thinking": False})
    target = load_target(str(folder / "target"), dtype="float32")
    run = open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, lambda message: None)
    manifest = json.loads((run.prepared / "manifest.json").read_text())
    assert manifest["data"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert manifest["chat"]["header"] == HEADER + EMPTY
    for other in ({"chat_template_kwargs": {"enable_thinking": True}}, {}):
        with pytest.raises(DataError, match="was prepared for .* with other data, tokenizer, template or settings"):
            prepare(recipe_of(folder, **other), run, target, lambda message: None)
    plain = open_run(tmp_path / "plain", recipe_of(folder))
    prepare(recipe_of(folder), plain, target, lambda message: None)
    assert "chat_template_kwargs" not in json.loads((plain.prepared / "manifest.json").read_text())["data"]


def test_training_and_evaluation_ask_alike_and_the_report_says_how(folder, tmp_path):
    recipe = recipe_of(folder, chat_template_kwargs={"enable_thinking": False})
    target = make_target(recipe)
    run = open_run(tmp_path / "run", recipe)
    train(recipe, run, target, lambda message: None)
    _, [prompt, *_] = gather_prompts(recipe.evaluation, recipe, target)
    asked, _ = by_hand(target.tokenizer, f"<|im_start|>user\nhi{HEADER}{EMPTY}")
    assert list(prompt.ids) == asked
    assert conversation_prompt(talk("hi"), target, Chat.of(recipe)) == asked
    said_, facts = [], json.loads((run.draft / "drafttrain.json").read_text())
    assert facts["chat_template_kwargs"] == {"enable_thinking": False}
    report = evaluate_draft(run.path, target, recipe.evaluation, recipe=recipe, say=said_.append)
    assert report["provenance"]["chat"]["header"] == HEADER + EMPTY and "notes" not in report
    asked_here = recipe.evaluation.model_copy(update={"prompts": str(folder / "test.jsonl")})
    report = evaluate_draft(run.draft, target, asked_here, say=said_.append)
    note = (
        f"{run.draft} was trained with chat_template_kwargs {{'enable_thinking': False}}; prompts are asked with none"
    )
    assert report["notes"] == [note] and f"note: {note}" in said_
    assert report["provenance"]["chat"] == {"mode": "template", "chat_template_kwargs": {}, "header": HEADER}
    assert asked_otherwise([run.draft], ON) == [note.replace("with none", "with {'enable_thinking': True}")]
