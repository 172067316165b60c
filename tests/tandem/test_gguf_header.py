"""Tensor infos of the GGUF header, whole, damaged and hostile."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from tandem.errors import ModelError
from tandem.gguf_metadata import read_gguf_header, read_gguf_metadata


def write(path: Path, *, alignment: int = 32) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header_bytes(*tensors: tuple[str, tuple[int, ...], int, int], entries: bytes = b"", num_entries: int = 0) -> bytes:
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), num_entries) + entries
    for name, dimensions, type_id, offset in tensors:
        data += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dimensions))
        data += struct.pack(f"<{len(dimensions)}QIQ", *dimensions, type_id, offset)
    return data


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_infos_agree_with_the_gguf_package(tmp_path: Path, alignment: int) -> None:
    path = write(tmp_path / "a.gguf", alignment=alignment)
    header = read_gguf_header(path)
    assert header.metadata == read_gguf_metadata(path)
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    assert [t.name for t in header.tensors] == list(theirs)
    for tensor in header.tensors:
        other = theirs[tensor.name]
        assert tensor.shape == tuple(int(n) for n in reversed(other.shape))
        assert tensor.type_id == other.tensor_type
        assert tensor.offset == other.data_offset
        assert tensor.offset % alignment == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header_bytes(("t", (4,), 0, 1 << 40)), "'t' starts behind the file's end"),
        (header_bytes(("t", (4,), 0, (1 << 64) - 1)), "'t' starts behind the file's end"),
        (header_bytes(("t", (), 0, 0)), "'t' has 0 dimensions"),
        (header_bytes(("t", (1, 1, 1, 1, 1), 0, 0)), "'t' has 5 dimensions"),
        (header_bytes(("t", (4,), 0, 0), ("t", (4,), 0, 0)) + bytes(64), "two tensors are called 't'"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "damaged"),
        (
            header_bytes(
                ("t", (4,), 0, 0),
                entries=struct.pack("<Q17sII", 17, b"general.alignment", 4, 48),
                num_entries=1,
            ),
            "general.alignment is 48",
        ),
        (
            header_bytes(entries=struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 50_000, num_entries=1),
            "arrays within arrays",
        ),
    ],
)
def test_what_no_writer_writes_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "b.gguf").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_gguf_header(tmp_path / "b.gguf")
    assert message in str(caught.value)


def test_a_head_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    whole = path.read_bytes()
    first = read_gguf_header(path).tensors[0].offset
    for length in range(first + 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"a\.gguf"):
            read_gguf_header(path)


def test_a_file_without_tensors_has_none(tmp_path: Path) -> None:
    (tmp_path / "c.gguf").write_bytes(header_bytes())
    assert read_gguf_header(tmp_path / "c.gguf").tensors == ()
