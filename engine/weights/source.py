"""What the loader needs of a weights format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Tensors by their Hugging Face name, in the file's dtype (quantized ones as float32)."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str) -> Tensor:
        """Read one tensor. Raises ModelError naming the file and the tensor."""
        ...

    def unread(self) -> list[str]:
        """Names that nobody asked for: a part of the model that the decoder does not know."""
        ...
