"""Safetensors folders: one model.safetensors, or shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.errors import ModelError
from tandem.model_files import read_json

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's weights files, sorted. Raises ModelError for none, or fewer than the index names.

    An index goes before model.safetensors, and both before other files, which may hold the same weights once more.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: weight_map is missing")
        paths = sorted({folder / Path(str(name)).name for name in weight_map.values()})
    elif (folder / WHOLE).is_file():
        paths = [folder / WHOLE]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        other = next((p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)), None)
        hint = f"; {other} is a pickle, which is never loaded: convert it to safetensors" if other else ""
        raise ModelError(f"{folder}: no *.safetensors{hint}")
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path}: named by {INDEX}, but missing")
    return paths


@contextmanager
def open_safetensors(folder: Path, paths: list[Path]) -> Iterator[SafetensorsSource]:
    """Open the shards; close them at exit. Raises ModelError naming a damaged file."""
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as exc:
                raise ModelError(f"{path}: not a readable safetensors file ({exc})") from exc
            where.update(dict.fromkeys(file.keys(), file))
        yield SafetensorsSource(folder, where)


class SafetensorsSource:
    """See TensorSource."""

    def __init__(self, folder: Path, where: dict[str, Any]) -> None:
        self._folder = folder
        self._where = where
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str) -> Tensor:
        if name not in self._where:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        self._read.add(name)
        tensor: Tensor = self._where[name].get_tensor(name)
        if tensor.dtype not in READABLE:
            raise ModelError(
                f"{self._folder}: tensor {name} is {tensor.dtype}: quantized checkpoints are not implemented"
            )
        return tensor

    def unread(self) -> list[str]:
        return [name for name in self._where if name not in self._read]
