"""What the router needs to know of a model, without its weights. Neighbours: model_files, router's validator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.config import ModelConfig
from tandem.errors import ConfigError, ModelError
from tandem.model_files import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. `max_model_len` is the context in tokens, prompt and answer together."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str


def read_model_info(files: ModelFiles, config: ModelConfig) -> ModelInfo:
    """Read what is served from the model's config and the operator's settings.

    Raises ModelError naming a missing key, ConfigError when `max_model_len` exceeds the model's own context.
    """
    model = files.config()
    max_model_len = _integer(model, "max_position_embeddings", files)
    if config.max_model_len > max_model_len:
        raise ConfigError(f"model.max_model_len: {config.max_model_len} exceeds the model's own {max_model_len}")
    eos = model.get("eos_token_id")
    return ModelInfo(
        name=config.name or files.name,
        architecture=(model.get("architectures") or [model.get("model_type", "")])[0],
        max_model_len=config.max_model_len or max_model_len,
        vocab_size=_integer(model, "vocab_size", files),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        bos_token_id=model.get("bos_token_id"),
        dtype="float32" if config.dtype == "auto" else config.dtype,
    )


def _integer(model: dict[str, Any], key: str, files: ModelFiles) -> int:
    value = model.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{files.path}: config key {key}: expected a positive integer, found {value!r}")
    return value
