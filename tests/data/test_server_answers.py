"""Answers from a server are those that the target gives in this process; every way a server can be wrong is told."""

import json
import threading

import pytest

from drafttrain.data import server_answers as module
from drafttrain.data.chat import audit
from drafttrain.data.conversations import Conversation, DataError
from drafttrain.data.http_client import EngineError, EngineLostError
from drafttrain.data.prepare import prepare
from drafttrain.data.regenerate import regenerate
from drafttrain.data.talks import CHANGED
from drafttrain.recipe import RecipeError, RegenerateConfig, parse_recipe
from drafttrain.target import Target
from tests.data.chat_tokenizers import CHATML, make_tokenizer, talk
from tests.data.fake_completions import FakeCompletions
from tests.data.test_regenerate import table_target
from tests.tiny_models import make_tokenizer as make_words
from tests.training.tiny_run import make_target, open_run, prompt_rows, settings, write_rows

CHAIN = ("Ċ", "H", "i", "<|im_end|>")
TALKS = [
    talk("one", "x", "two", "y"),
    talk("a"),
    Conversation(prompt="b", source="f:3"),
    talk("c", "x", "d"),
    talk("e"),
]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.001)


@pytest.fixture(scope="module")
def target() -> Target:
    return table_target(make_tokenizer(CHATML), CHAIN)


def fake(target: Target, chain=CHAIN, **options) -> FakeCompletions:
    ids = [target.tokenizer.get_vocab()[token] for token in chain]
    after = dict(zip(ids, ids[1:], strict=False))
    return FakeCompletions(
        lambda token: after.get(token, 0), tuple(target.stop_ids), target.tokenizer.decode, **options
    )


def run(target, conversations, path, said=None, **settings):
    say = None if said is None else said.append
    return regenerate(target, conversations, RegenerateConfig(**settings), path, chat="auto", max_length=512, say=say)


def plain(encoded) -> list:
    return [(one.input_ids, one.loss_mask, one.dropped, one.open_turns, one.source) for one in encoded]


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 2}])
@pytest.mark.parametrize("ids", [True, False])
def test_a_server_answers_what_the_target_does(target, tmp_path, ids, options) -> None:
    here, said = run(target, TALKS, tmp_path / "here.jsonl", **options), []
    with fake(target, ids=ids) as server:
        there = run(target, TALKS, tmp_path / "there.jsonl", said, server=server.url, concurrency=2, **options)
    assert plain(there) == plain(here)
    assert sum(one.open_turns for one in there) == (0 if not options else len(TALKS))
    assert len(server.bodies) == (7 if not options else 5) and server.most <= 2
    notes = [line for line in said if "returns no token ids; answers are tokenised again" in line]
    assert len(notes) == (0 if ids else 1)


def test_what_is_asked_for(target, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    options = {"temperature": [0.0, 0.7], "top_p": 0.9, "top_k": 5, "max_new_tokens": 9, "seed": 3}
    bodies = []
    for name in ("first", "again"):
        with fake(target) as server:
            run(target, TALKS[1:3], tmp_path / f"{name}.jsonl", server=server.url, concurrency=1, **options)
        bodies.append(server.bodies)
    assert bodies[0] == bodies[1]  # Seeds belong to the conversation and turn.
    first, second = bodies[0]
    assert (first["temperature"], second["temperature"]) == (0.0, 0.7) and first["seed"] != second["seed"]
    expected = {"model": "model", "max_tokens": 9, "top_p": 0.9, "top_k": 5, "return_token_ids": True}
    expected |= {"repetition_penalty": 1.0, "min_p": 0.0, "stop_token_ids": list(target.stop_ids)}
    assert expected.items() <= first.items() and "stream" not in first
    assert server.headers[0]["Authorization"] == "Bearer secret"
    with fake(target) as server:
        run(target, TALKS[1:2], tmp_path / "plain.jsonl", server=server.url)
    assert server.bodies[0]["top_k"] == -1


def test_the_servers_context_is_a_limit(target, tmp_path) -> None:
    length = len(run(target, TALKS[1:2], tmp_path / "here.jsonl")[0].input_ids)
    with fake(target, max_model_len=length - 1) as server:
        [found] = run(target, TALKS[1:2], tmp_path / "there.jsonl", server=server.url)
    assert len(found.input_ids) == length - 1 and found.open_turns == 1 and server.bodies[0]["max_tokens"] == 2


def test_an_interrupted_run_goes_on_with_what_is_missing(target, tmp_path) -> None:
    whole, path = run(target, TALKS, tmp_path / "here.jsonl"), tmp_path / "there.jsonl"
    with (
        fake(target, faults={4: (400, '{"error": "too long"}')}) as server,
        pytest.raises(EngineError, match=r"answered 400: .*too long.* 3 of 5 conversations are done and kept"),
    ):
        run(target, TALKS, path, server=server.url, concurrency=1)
    assert path.read_text().count("\n") == 1 + 3
    with fake(target) as server:  # On another port.
        assert plain(run(target, TALKS, path, server=server.url, concurrency=3)) == plain(whole)
        assert len(server.bodies) == 3  # One conversation of two turns, one of one.
        assert plain(run(target, TALKS, path, server=server.url)) == plain(whole) and len(server.bodies) == 3
    with pytest.raises(DataError, match="served 'model', now None"):
        run(target, TALKS, path)
    with fake(target, name="a/Model") as server, pytest.raises(DataError, match="served 'model', now 'a/Model'"):
        run(target, TALKS, path, server=server.url)


# Servers that fail.


@pytest.mark.parametrize("fault", [(503, "loading"), (429, "slow down"), (500, "EngineCore"), "lost"])
def test_a_busy_or_lost_server_is_asked_again(target, tmp_path, fault) -> None:
    with fake(target, faults=dict.fromkeys(range(1, 4), fault)) as server:
        found = run(target, TALKS, tmp_path / "there.jsonl", server=server.url, concurrency=1)
    assert plain(found) == plain(run(target, TALKS, tmp_path / "here.jsonl")) and len(server.bodies) == 7 + 3


def test_a_server_that_stays_busy_is_given_up(target, tmp_path) -> None:
    with (
        fake(target, faults=dict.fromkeys(range(1, 100), (503, "loading"))) as server,
        pytest.raises(EngineError, match="503: loading.*1 of 5 conversations are done .*goes on with the others"),
    ):
        run(target, TALKS[1:3] + TALKS[:1] + TALKS[3:], tmp_path / "there.jsonl", server=server.url, concurrency=1)
    assert len(server.bodies) == 1 + module.TRIES


def test_the_pauses_double(target, tmp_path, monkeypatch) -> None:
    pauses = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: pauses.append(timeout))
    monkeypatch.setattr(module, "PAUSE", 0.5)
    server = module.AnswerServer(None, "m", 99, RegenerateConfig(), target, "auto")

    class Lost:
        def post_json(self, path, body):
            raise EngineLostError("gone")

    server.server = Lost()
    with pytest.raises(EngineLostError):
        server._ask(module.Talk(0, 0.0, [], input_ids=[1]), 9)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("status", "mend"), [(401, "OPENAI_API_KEY"), (404, "/v1/models"), (422, "does not know"), (400, "shorten")]
)
def test_a_refusal_is_told_at_once(target, tmp_path, status, mend) -> None:
    with (
        fake(target, faults={0: (status, '{"detail": "no"}')}) as server,
        pytest.raises(EngineError, match=f'(?s)answered {status}: .*"no".*Mend: .*{mend}'),
    ):
        run(target, TALKS[:1], tmp_path / "there.jsonl", server=server.url)
    assert len(server.bodies) == 1


def test_no_server_there(target, tmp_path) -> None:
    with fake(target) as server:
        url = server.url
    with pytest.raises(EngineError, match="does not answer"):
        run(target, TALKS, tmp_path / "there.jsonl", server=url)
    assert not (tmp_path / "there.jsonl").exists()


# Servers of something else.


@pytest.mark.parametrize(
    ("name", "root", "fits"),
    [
        ("org/model", None, True),
        ("MODEL", None, True),
        ("short", "/data/models/model", True),
        ("other", None, False),
        ("model-2", "/data/model-2", False),
        ("org/model/other", None, False),
    ],
)
def test_a_server_of_another_model_is_refused(target, tmp_path, name, root, fits) -> None:
    assert target.name == "model"
    with fake(target, name=name, root=root) as server:
        if fits:
            run(target, TALKS[:1], tmp_path / "there.jsonl", server=server.url)
            assert server.bodies[0]["model"] == name
        else:
            with pytest.raises(
                EngineError, match=f"serves {name}. Expected the target model. Mend: .*regenerate.model"
            ):
                run(target, TALKS[:1], tmp_path / "there.jsonl", server=server.url)
            assert not server.bodies
        run(target, TALKS[:1], tmp_path / "named.jsonl", server=server.url, model=name)
        with pytest.raises(EngineError, match=f"serves {name}. Expected data.regenerate.model 'mine'"):
            run(target, TALKS[:1], tmp_path / "wrong.jsonl", server=server.url, model="mine")


@pytest.mark.parametrize("models", [{"data": []}, {"object": "error"}, [1]])
def test_a_server_without_models(target, tmp_path, models) -> None:
    with fake(target, models=models) as server, pytest.raises(EngineError, match="Expected a list of models"):
        run(target, TALKS[:1], tmp_path / "there.jsonl", server=server.url)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [3, 10**6]}, "answered token 1000000. Expected ids below"),
        ({"token_ids": [-1]}, "answered token -1"),
        ({"prompt_token_ids": [1, 2]}, "put other tokens in front of its answer"),
        ({"text": None}, "Expected choices with text"),
    ],
)
def test_answers_that_cannot_be_the_targets(target, tmp_path, change, message) -> None:
    with fake(target, change=lambda choice: choice | change) as server, pytest.raises(EngineError, match=message):
        run(target, TALKS[:1], tmp_path / "there.jsonl", server=server.url)


def test_nothing_is_kept_behind_a_stop(target, tmp_path) -> None:
    stop = target.stop_ids[0]
    with fake(target, change=lambda choice: choice | {"token_ids": [7, stop, 7, 7]}) as server:
        [found] = run(target, TALKS[1:2], tmp_path / "there.jsonl", server=server.url)
    assert found.input_ids[-2:] == [7, stop] and sum(found.loss_mask) == 2 and found.open_turns == 0


# Text without ids.


def test_text_that_is_not_the_same_tokens_again_is_dropped_with_a_count(target, tmp_path) -> None:
    written = iter([("Hi", 3), ("Hi", 9), ("H\ufffd", 3), ("Hi", 2), ("Hi", None)])

    def change(choice: dict) -> dict:
        text, counted = next(written)
        counts.append(counted)
        return choice | {"text": text}

    counts: list = []
    with fake(target, ids=False, change=change) as server:
        answer = server.answer
        server.answer = lambda body: answer(body) | {"usage": {"completion_tokens": counts[-1]}}
        found = run(target, [talk(str(i)) for i in range(5)], tmp_path / "r.jsonl", server=server.url, concurrency=1)
    # As counted; more tokens than the text has; not what the tokenizer reads; the stop not counted; no count at all.
    assert [one.dropped for one in found] == [None, CHANGED, CHANGED, None, None]
    assert audit(found, target.tokenizer)["dropped"] == {CHANGED: 2}
    ids = target.tokenizer("Hi<|im_end|>", add_special_tokens=False)["input_ids"]
    assert found[0].input_ids[-3:] == ids == found[3].input_ids[-3:] and sum(found[4].loss_mask) == 3
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()[1:]]
    assert [line["finish"] == CHANGED for line in lines] == [False, True, True, False, False]
    with fake(target, ids=False) as server:
        again = run(target, [talk(str(i)) for i in range(5)], tmp_path / "r.jsonl", server=server.url)
        assert plain(again) == plain(found) and not server.bodies


@pytest.mark.parametrize(("text", "kept"), [("w3", True), ("zz", False), ("w3 w4", False)])
def test_text_that_the_tokenizer_does_not_give_back_is_dropped(text, kept) -> None:
    words = make_words()  # Its decoder puts no space between words, and <unk> for those it does not know.
    target = table_target(words, ("w1", "w3", "<eos>"))
    server = module.AnswerServer(None, "m", 99, RegenerateConfig(), target, "none")
    found = server._tokens_of(text, {"finish_reason": "stop"})
    assert found == ([words.get_vocab()["w3"], words.eos_token_id] if kept else None)


# The recipe.


def test_prepare_with_a_server(tmp_path) -> None:
    values = settings(tmp_path)
    write_rows(tmp_path / "train.jsonl", prompt_rows(6, 1))
    write_rows(tmp_path / "validation.jsonl", prompt_rows(2, 2))
    values["data"]["regenerate"] = {"max_new_tokens": 4}
    bare = make_target(parse_recipe(values, tmp_path))
    prepared = []
    for port in range(2):
        with FakeCompletions(
            lambda token: 5 + (token + 1) % 90, tuple(bare.stop_ids), bare.tokenizer.decode, name="target"
        ) as server:
            values["data"]["regenerate"] |= {"server": server.url, "concurrency": 3 + port}
            recipe = parse_recipe(values, tmp_path)
            run = open_run(tmp_path / "run", recipe)
            prepared.append(prepare(recipe, run, make_target(recipe), lambda message: None))
        assert len(server.bodies) == (8 if port == 0 else 0)
    assert prepared[0].rows == prepared[1].rows
    for row in prepared[0].rows["train"]:
        ids = row["input_ids"]
        assert row["loss_mask"][-4:] == [1] * 4 and ids[-3:] == [5 + (token + 1) % 90 for token in ids[-4:-1]]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"model": "m"}, "found model 'm', expected it beside server"),
        ({"concurrency": 4}, "found concurrency 4, expected it beside server"),
    ],
)
def test_settings_that_would_be_ignored(tmp_path, given, found) -> None:
    values = settings(tmp_path)
    values["data"]["regenerate"] = given
    with pytest.raises(RecipeError, match=found):
        parse_recipe(values, tmp_path)


def test_a_recipe_for_the_target_itself_takes_a_server_by_override(tmp_path) -> None:
    values = settings(tmp_path)
    values["data"]["regenerate"] = {"server": "http://x/v1", "batch_size": 4}
    assert parse_recipe(values, tmp_path).data.regenerate.server == "http://x/v1"


def test_an_address_that_is_none(target, tmp_path) -> None:
    with pytest.raises(EngineError, match="the server's address is 'localhost:8000'"):
        run(target, TALKS, tmp_path / "r.jsonl", server="localhost:8000")
