"""Texts from GGUF headers, held against gguf's own writer and reader; damaged files; weights that are not finite."""

from pathlib import Path

import gguf
import pytest
import torch

from drafttrain.export.base import all_finite
from drafttrain.export.gguf_header import gguf_text

LICENCE = "general.license"


@pytest.fixture
def file(tmp_path) -> Path:
    """Every kind of value before the text that is looked for."""
    writer = gguf.GGUFWriter(tmp_path / "some.gguf", "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"some.{kind}", 3)
    for kind in ("float32", "float64"):
        getattr(writer, f"add_{kind}")(f"some.{kind}", 0.5)
    writer.add_bool("some.bool", True)
    for name, values in {"words": ["a", "", "größer"], "numbers": [1, 2, 3], "nested": [["a", "b"], ["c"]]}.items():
        writer.add_array(f"some.{name}", values)
    writer.add_string(LICENCE, "apache-2.0")
    writer.add_string("general.name", "größer")
    writer.add_tensor("weight", torch.ones(4).numpy())
    for step in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{step}")()
    writer.close()
    return tmp_path / "some.gguf"


def test_a_text_is_what_ggufs_own_reader_finds(file):
    fields = gguf.GGUFReader(file).fields
    for key in (LICENCE, "general.name", "general.architecture"):
        assert gguf_text(file, key) == fields[key].contents()
    assert gguf_text(file, LICENCE) == "apache-2.0"


@pytest.mark.parametrize("key", ["general.licence", "some.uint32", "some.words", ""])
def test_what_is_no_text_or_not_there_is_none(file, key):
    assert gguf_text(file, key) is None


def test_files_that_are_cut_short_or_none_are_none(file):
    whole = file.read_bytes()
    for broken in (b"", b"GG", whole[:20], whole[:200], b"X" + whole[1:], whole[:4] + b"\1" + whole[5:]):
        file.write_bytes(broken)
        assert gguf_text(file, LICENCE) is None
    length = whole.index(b"some.uint8") - 8
    file.write_bytes(whole[:length] + b"\xff" * 8 + whole[length + 8 :])
    assert gguf_text(file, LICENCE) is None
    kind = whole.index(LICENCE.encode()) + len(LICENCE)
    file.write_bytes(whole[:kind] + b"\x63" + whole[kind + 1 :])
    assert gguf_text(file, "general.name") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_seen(dtype):
    values = torch.randn(3, 1000, dtype=dtype)
    assert all_finite(values) and all_finite(values[:0]) and all_finite(torch.tensor(1.0, dtype=dtype))
    for wrong in ("nan", "inf", "-inf"):
        values[1, 700] = float(wrong)
        assert not all_finite(values)
