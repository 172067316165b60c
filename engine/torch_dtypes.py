"""Names of dtypes, as configuration and layouts spell them, to torch's."""

from __future__ import annotations

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`; KeyError for one that KVLayout does not know either."""
    return _DTYPES[name]
