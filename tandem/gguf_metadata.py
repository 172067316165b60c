"""The head of a GGUF file: key-value metadata and where the tensors lie. Neighbours: tokenizer, config, engine/weights.

The `gguf` package's reader builds a numpy view of every array element, which takes seconds for a vocabulary; every
process of a cluster reads the metadata, so this reads only what it needs, in well under a second.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tandem.errors import ModelError

MAGIC = b"GGUF"
# GGUF value types: struct codes of the scalars; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_STRING_NBYTES = 16 * 1024 * 1024
MAX_ARRAY_LENGTH = 8 * 1024 * 1024
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. shape: outermost dimension first; type_id: ggml's; offset: bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the tensors' bytes."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file (version 2 or 3, little endian): key -> scalar, str or list.

    Raises ModelError when the file cannot be read, is no GGUF file or is cut short.
    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    with _open(path) as (file, _num_tensors, num_entries):
        return _read_metadata(file, num_entries)


def read_gguf_header(path: Path) -> GGUFHeader:
    """Return metadata and tensor infos, read as `read_gguf_metadata` does.

    Every tensor starts inside the file; whether it also ends there depends on its type, which the reader of the bytes
    knows. Raises ModelError.
    """
    with _open(path) as (file, num_tensors, num_entries):
        metadata = _read_metadata(file, num_entries)
        infos = [_read_tensor_info(file) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}")
        data_start = -(-file.tell() // alignment) * alignment
        file_nbytes = os.fstat(file.fileno()).st_size
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, relative in infos:
            if name in tensors:
                raise ValueError(f"two tensors are called {name!r}")
            if data_start + relative >= file_nbytes:
                raise ValueError(f"tensor {name!r} starts behind the file's end")
            tensors[name] = GGUFTensor(name, shape, type_id, data_start + relative)
        return GGUFHeader(metadata, tuple(tensors.values()))


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, int, int]]:
    """The open file behind its first fields, the number of tensors and that of entries; errors become ModelError."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(f"{path}: not a GGUF file")
            (version,) = _unpack(file, "I")
            if version not in (2, 3):
                raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
            num_tensors, num_entries = _unpack(file, "QQ")
            yield file, num_tensors, num_entries
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from exc
    except (struct.error, UnicodeDecodeError, ValueError) as exc:
        raise ModelError(f"{path}: damaged GGUF metadata ({exc}); fetch the file again") from exc


def _read_metadata(file: BinaryIO, num_entries: int) -> dict[str, Any]:
    metadata = {}
    for _ in range(num_entries):
        key = _read_string(file)
        (kind,) = _unpack(file, "I")
        metadata[key] = _read_value(file, kind)
    return metadata


def _read_tensor_info(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _read_string(file)
    (num_dimensions,) = _unpack(file, "I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    innermost_first = _unpack(file, f"{num_dimensions}Q")
    type_id, relative = _unpack(file, "IQ")
    return name, innermost_first[::-1], type_id, relative


def _read_value(file: BinaryIO, kind: int, depth: int = 0) -> Any:
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _unpack(file, _code(kind))[0]
    (element_kind,) = _unpack(file, "I")
    (length,) = _unpack(file, "Q")
    if depth >= MAX_ARRAY_DEPTH:
        raise ValueError("arrays within arrays without end")
    if length > MAX_ARRAY_LENGTH:
        raise ValueError(f"an array of {length} elements")
    if element_kind in (_STRING, _ARRAY):
        return [_read_value(file, element_kind, depth + 1) for _ in range(length)]
    return list(_unpack(file, f"{length}{_code(element_kind)}"))


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"value type {kind}")
    return _SCALARS[kind]


def _read_string(file: BinaryIO) -> str:
    (nbytes,) = _unpack(file, "Q")
    if nbytes > MAX_STRING_NBYTES:
        raise ValueError(f"a string of {nbytes} bytes")
    data = file.read(nbytes)
    if len(data) != nbytes:
        raise ValueError("it ends early")
    return data.decode("utf-8")


def _unpack(file: BinaryIO, code: str) -> tuple[Any, ...]:
    layout = struct.Struct("<" + code)
    return layout.unpack(file.read(layout.size))
