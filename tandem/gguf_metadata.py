"""The key-value metadata at the head of a GGUF file, read without touching the tensors. Neighbours: tokenizer, config.

The `gguf` package's reader builds a numpy view of every array element, which takes seconds for a vocabulary; every
process of a cluster reads the metadata, so this reads only what it needs, in well under a second.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from tandem.errors import ModelError

MAGIC = b"GGUF"
# GGUF value types: struct codes of the scalars; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_STRING_NBYTES = 16 * 1024 * 1024
MAX_ARRAY_LENGTH = 8 * 1024 * 1024


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file (version 2 or 3, little endian): key -> scalar, str or list.

    Raises ModelError when the file cannot be read, is no GGUF file or is cut short.
    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(f"{path}: not a GGUF file")
            (version,) = _unpack(file, "I")
            if version not in (2, 3):
                raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
            _num_tensors, num_entries = _unpack(file, "QQ")
            metadata = {}
            for _ in range(num_entries):
                key = _read_string(file)
                (kind,) = _unpack(file, "I")
                metadata[key] = _read_value(file, kind)
            return metadata
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from exc
    except (struct.error, UnicodeDecodeError, ValueError) as exc:
        raise ModelError(f"{path}: damaged GGUF metadata ({exc}); fetch the file again") from exc


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _unpack(file, _code(kind))[0]
    (element_kind,) = _unpack(file, "I")
    (length,) = _unpack(file, "Q")
    if length > MAX_ARRAY_LENGTH:
        raise ValueError(f"an array of {length} elements")
    if element_kind in (_STRING, _ARRAY):
        return [_read_value(file, element_kind) for _ in range(length)]
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
