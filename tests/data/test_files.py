"""Files and folders are whole or absent, and what was there before survives a failure."""

import json
import os

import pytest

from drafttrain.data.files import replace_folder, write_beside, write_json


class Full(OSError):
    """What the test raises for a disk that is full."""


def test_a_file_is_swapped_in_whole(tmp_path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    write_json(path, {"x": [2]})
    assert json.loads(path.read_text()) == {"x": [2]} and path.read_text().endswith("\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_file_leaves_the_old_one_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def half(temporary) -> None:
        assert temporary.parent == tmp_path and temporary != path
        temporary.write_text("ha")
        raise Full

    with pytest.raises(Full):
        write_beside(path, half)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(Full):
        write_beside(tmp_path / "b.json", half)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_swapped_in_whole(tmp_path) -> None:
    folder = tmp_path / "deep" / "draft"
    replace_folder(folder, lambda path: (path / "one").write_text("1") and None)
    assert [entry.name for entry in folder.iterdir()] == ["one"]

    def second(path) -> None:
        assert (folder / "one").exists(), "the old folder stays until the new one is whole"
        (path / "two").write_text("2")

    replace_folder(folder, second)
    assert [entry.name for entry in folder.iterdir()] == ["two"]
    assert [entry.name for entry in folder.parent.iterdir()] == ["draft"]


def test_a_failed_folder_leaves_the_old_one_and_nothing_else(tmp_path) -> None:
    folder = tmp_path / "draft"

    def half(path) -> None:
        (path / "half").write_text("ha")
        raise Full

    with pytest.raises(Full):
        replace_folder(folder, half)
    assert list(tmp_path.iterdir()) == []
    replace_folder(folder, lambda path: (path / "one").write_text("1") and None)
    with pytest.raises(Full):
        replace_folder(folder, half)
    assert [entry.name for entry in folder.iterdir()] == ["one"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_leftovers_of_a_killed_process_do_not_get_in(tmp_path) -> None:
    folder = tmp_path / "draft"
    (tmp_path / ".draft.new").mkdir()
    (tmp_path / ".draft.new" / "half").write_text("ha")
    replace_folder(folder, lambda path: (path / "one").write_text("1") and None)
    assert [entry.name for entry in folder.iterdir()] == ["one"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_a_folder_lost_between_two_renames_comes_back(tmp_path) -> None:
    """A process killed after the old folder was moved away and before the new one took its place."""
    folder = tmp_path / "draft"
    old = tmp_path / ".draft.old"
    old.mkdir()
    (old / "one").write_text("1")

    def fails(path) -> None:
        raise Full

    with pytest.raises(Full):
        replace_folder(folder, fails)
    assert [entry.name for entry in folder.iterdir()] == ["one"]


def test_files_of_a_folder_are_as_readable_as_the_umask_says(tmp_path):
    def fill(folder):
        (folder / "weights").write_text("")
        (folder / "weights").chmod(0o600)

    old = os.umask(0o022)
    try:
        replace_folder(tmp_path / "draft", fill)
    finally:
        os.umask(old)
    assert (tmp_path / "draft" / "weights").stat().st_mode & 0o777 == 0o644
