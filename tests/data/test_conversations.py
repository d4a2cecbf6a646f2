"""Rows of every format come out alike; every broken row ends in a DataError that names file and line."""

import json

import datasets
import huggingface_hub
import pytest

from drafttrain.data.conversations import Conversation, DataError, load_conversations, parse_row
from drafttrain.recipe import DataEntry

TURNS = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path, **options):
    return load_conversations([DataEntry(path=str(path), **options)], seed=0)


def texts(path, seed=0, **options):
    return [one.text for one in load_conversations([DataEntry(path=str(path), **options)], seed=seed)]


@pytest.mark.parametrize("format", ["auto", "named"])
@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("messages", {"messages": list(TURNS)}, {"messages": TURNS}),
        ("messages", {"conversations": list(TURNS), "id": 3}, {"messages": TURNS}),
        ("messages", {"prompt": "hi", "messages": list(TURNS)}, {"messages": TURNS}),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
            {"messages": TURNS},
        ),
        ("prompt_completion", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
        ("prompt_completion", {"question": "a", "answer": "b"}, {"prompt": "a", "completion": "b"}),
        ("prompt_completion", {"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}),
        (
            "prompt_completion",
            {"instruction": "a", "input": "c", "output": "b"},
            {"prompt": "a\n\nc", "completion": "b"},
        ),
        ("prompt_completion", {"prompt": "no", "question": "a", "answer": "b"}, {"prompt": "a", "completion": "b"}),
        ("prompt_completion", {"prompt": "a"}, {"prompt": "a"}),
        ("text", {"text": "a b"}, {"text": "a b"}),
        ("tokens", {"input_ids": [1, 2]}, {"input_ids": (1, 2)}),
        ("tokens", {"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": (1, 2), "loss_mask": (0, 1)}),
        ("tokens", {"input_ids": [1], "text": None, "messages": None}, {"input_ids": (1,)}),
    ],
)
def test_each_format(name, row, expected, format):
    found = parse_row(row, name if format == "named" else "auto", "f:1")
    assert found == Conversation(**expected, source="f:1")


def test_system_message_and_trailing_user_turn_are_kept():
    turns = [{"role": "system", "content": "be brief"}, *TURNS, {"role": "user", "content": "more"}]
    assert parse_row({"messages": turns}, "auto", "f:1").messages == tuple(turns)


def test_jsonl_names_line_and_skips_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one\xe2\x80\xa8two"}\r\n\n{"text": "three"}')
    assert load(path) == [
        Conversation(text="one\u2028two", source=f"{path}:1"),
        Conversation(text="three", source=f"{path}:3"),
    ]


def test_json_list_json_lines_and_parquet_agree(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}]
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps(rows, indent=1))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for path in (listed, write(tmp_path / "lines.json", *rows), tmp_path / "rows.parquet"):
        assert texts(path) == ["a", "b"]
    assert load(listed)[1].source == f"{listed}:row 2"


def test_parquet_of_messages(tmp_path):
    datasets.Dataset.from_list([{"messages": list(TURNS)}]).to_parquet(tmp_path / "m.parquet")
    assert load(tmp_path / "m.parquet")[0].messages == TURNS


def test_folder_is_read_in_name_order_and_other_files_ignored(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.jsonl", {"text": "b"})
    write(tmp_path / "a.jsonl", {"text": "a"})
    write(tmp_path / "sub" / "c.jsonl", {"text": "c"})
    (tmp_path / "README.md").write_text("no data")
    assert texts(tmp_path) == ["a", "b", "c"]


def test_folder_of_save_to_disk_has_splits(tmp_path):
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved", split="test") == ["test"]
    with pytest.raises(DataError, match="no split 'dev', expected one of train, test"):
        load(tmp_path / "saved", split="dev")


def test_weight_repeats_and_samples_by_seed(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"text": str(i)} for i in range(20)))
    everything = [str(i) for i in range(20)]
    assert texts(path, weight=2) == everything * 2
    half = texts(path, weight=0.5)
    assert len(half) == len(set(half)) == 10 and half == sorted(half, key=int)
    assert texts(path, weight=0.5) == half != texts(path, weight=0.5, seed=1)
    more = texts(path, weight=1.25)
    assert more[:20] == everything and len(set(more[20:])) == 5


def test_entries_keep_their_order(tmp_path):
    entries = [DataEntry(path=str(write(tmp_path / f"{name}.jsonl", {"text": name}))) for name in "ba"]
    assert [one.text for one in load_conversations(entries, seed=0)] == ["b", "a"]


def turns(*roles):
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "a"', "broken JSON .*column"),
        ('["text"]', "found list, expected an object"),
        ({"body": "x", "title": "y"}, "found the keys body, title, expected messages"),
        ({}, r"found the keys \(none\)"),
        (turns("assistant", "user"), "roles do not alternate: found assistant, user"),
        (turns("user", "user"), "roles do not alternate"),
        (turns("user", "system", "assistant"), "roles do not alternate"),
        (turns("system"), "roles do not alternate"),
        (turns("user", "tool"), "roles do not alternate: found user, tool"),
        (turns("user", "narrator"), "message 2: found the role 'narrator', expected one of system, developer, user"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "expected a list"),
        ({"messages": [{"text": "hi"}]}, "message 1: found the keys text, expected role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content: found list .* expected a string"),
        ({"messages": [{"role": "user"}]}, "content: found NoneType None, expected a string"),
        ({"conversations": [{"from": "human", "value": 3}]}, "value: found int 3, expected a string"),
        ({"prompt": "a", "completion": ["b"]}, "completion: found list"),
        ({"text": 1}, "text: found int 1"),
        ('{"text": "\\ud800"}', "lone surrogate"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids and 1 loss_mask values"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "expected only 0 and 1"),
        ({"input_ids": [1, -2]}, "list of integers >= 0"),
        ({"input_ids": [1, True]}, "list of integers >= 0"),
        ({"input_ids": []}, "at least one token id"),
    ],
)
def test_broken_rows_name_file_and_line(tmp_path, row, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:2: (.*){message}"):
        load(path)


def test_format_that_the_row_lacks(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:1: found the keys text, expected input_ids"):
        load(write(tmp_path / "a.jsonl", {"text": "a"}), format="tokens")


def test_broken_json_list_names_its_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(DataError, match=r"a\.json:2: broken JSON"):
        load(path)


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: found bytes that are not UTF-8"):
        load(path)


@pytest.mark.parametrize(("content", "message"), [(b"", "an empty file"), (b"\n \n", "an empty file")])
def test_empty_file(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(path)


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        load(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="a folder without data files"):
        load(tmp_path)
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(DataError, match=r"found a \.md file, expected one of \.jsonl"):
        load(tmp_path / "a.md")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="found no rows"):
        load(tmp_path / "list.json")
    with pytest.raises(DataError, match=r"nothing left of 1 rows at weight 0\.1"):
        load(write(tmp_path / "one.jsonl", {"text": "a"}), weight=0.1)
    with pytest.raises(DataError, match="no conversations"):
        load_conversations([], seed=0)


def test_broken_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"a\.parquet: .*expected a parquet file"):
        load(tmp_path / "a.parquet")


@pytest.mark.timeout(20)
def test_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"some/set: the hub at http://127\.0\.0\.1:9 cannot be reached"):
        load_conversations([DataEntry(dataset="some/set")], seed=0)
