"""What the router learns of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.config import ModelConfig
from tandem.errors import ConfigError, ModelError
from tandem.model_files import ModelFiles
from tandem.model_info import read_model_info
from tests.support.small_gguf import write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 128,
    "vocab_size": 300,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def files_with(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelFiles:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelFiles("hf", path, "tiny")


def test_a_models_own_numbers_are_the_defaults(tmp_path: Path) -> None:
    info = read_model_info(files_with(tmp_path), ModelConfig())
    assert (info.name, info.architecture, info.max_model_len) == ("tiny", "LlamaForCausalLM", 128)
    assert (info.vocab_size, info.eos_token_ids, info.bos_token_id, info.dtype) == (300, (2,), 1, "float32")


def test_the_operator_may_rename_shorten_and_choose_the_dtype(tmp_path: Path) -> None:
    info = read_model_info(files_with(tmp_path), ModelConfig(name="mine", max_model_len=64, dtype="bfloat16"))
    assert (info.name, info.max_model_len, info.dtype) == ("mine", 64, "bfloat16")


def test_a_context_longer_than_the_models_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"256.*128"):
        read_model_info(files_with(tmp_path), ModelConfig(max_model_len=256))


def test_eos_ids_are_those_of_config_and_generation_config(tmp_path: Path) -> None:
    info = read_model_info(files_with(tmp_path, {"eos_token_id": [7, 2]}), ModelConfig())
    assert info.eos_token_ids == (2, 7)


def test_a_model_without_eos_has_none(tmp_path: Path) -> None:
    info = read_model_info(files_with(tmp_path, {}, eos_token_id=None), ModelConfig())
    assert info.eos_token_ids == ()


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, "many", 0])
def test_a_missing_or_wrong_key_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read_model_info(files_with(tmp_path, **{key: value}), ModelConfig())


def test_a_gguf_file_tells_the_same_things(tmp_path: Path) -> None:
    metadata = {
        "llama.block_count": 2,
        "llama.context_length": 96,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 300,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    path = write_gguf(tmp_path / "tiny.gguf", metadata)
    info = read_model_info(ModelFiles("gguf", path, "tiny"), ModelConfig())
    assert (info.name, info.architecture, info.max_model_len) == ("tiny", "LlamaForCausalLM", 96)
    assert (info.vocab_size, info.eos_token_ids, info.bos_token_id) == (300, (2,), 1)
