"""The metadata reader against files of the `gguf` package's writer, whole and damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tandem.errors import ModelError
from tandem.gguf_metadata import read_gguf_metadata
from tests.support.small_gguf import write_gguf

METADATA = {
    "a.string": "héllo",
    "a.number": 7,
    "a.bool": True,
    "a.float": 0.5,
    "strings": ["x", "", "日本"],
    "numbers": [1, -2, 3],
    "floats": [0.5, -1.0],
}


def test_every_kind_of_value_is_read_back(tmp_path: Path) -> None:
    read = read_gguf_metadata(write_gguf(tmp_path / "a.gguf", METADATA))
    assert read == {"general.architecture": "llama", **METADATA}


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "a.gguf", METADATA).read_bytes()
    end = whole.rindex(struct.pack("<ff", 0.5, -1.0)) + 8
    for length in range(end):
        (tmp_path / "b.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"b\.gguf"):
            read_gguf_metadata(tmp_path / "b.gguf")


def test_sizes_that_no_file_has_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    for entry in (struct.pack("<Q", 1 << 60), struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 60)):
        (tmp_path / "c.gguf").write_bytes(header + entry)
        with pytest.raises(ModelError, match="damaged"):
            read_gguf_metadata(tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"", "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    ],
)
def test_other_files_and_versions_are_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "d.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_gguf_metadata(tmp_path / "d.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: No such file"):
        read_gguf_metadata(tmp_path / "none.gguf")
