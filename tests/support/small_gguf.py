"""GGUF files that hold a tokenizer and no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """Write `metadata` (str, bool, int, float or lists of them) as a GGUF file."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
