"""Tokenizers of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders

from tandem.errors import InvalidRequest, ModelError
from tandem.model_files import ModelFiles
from tandem.tokenizer import TextTokenizer, load_tokenizer
from tests.support.small_tokenizers import (
    CHATML,
    byte_fallback_backend,
    byte_fallback_tokenizer,
    byte_level_backend,
    byte_level_tokenizer,
)

HELLO = [{"role": "user", "content": "hi"}]


def folder_of(path: Path, backend: HFTokenizer, config: dict[str, Any] | None = None) -> ModelFiles:
    backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles("hf", path, "model")


def load(files: ModelFiles) -> TextTokenizer:
    tokenizer = load_tokenizer(files)
    assert isinstance(tokenizer, TextTokenizer)
    return tokenizer


def test_a_folder_without_tokenizer_json_has_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(ModelFiles("hf", tmp_path, "model")) is None


def test_text_survives_encoding_and_decoding(tmp_path: Path) -> None:
    tokenizer = load(folder_of(tmp_path, byte_level_backend()))
    text = "hello  wörld €😀\n\n\t日本語"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_is_added_where_tokenizer_json_says_so_and_can_be_left_out(tmp_path: Path) -> None:
    tokenizer = load(folder_of(tmp_path, byte_fallback_backend()))
    with_bos = tokenizer.encode("he")
    assert with_bos[0] == tokenizer.token_id("<s>")
    assert tokenizer.encode("he", add_special_tokens=False) == with_bos[1:]


def test_truncation_and_padding_of_tokenizer_json_are_not_for_serving(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    assert len(load(folder_of(tmp_path, backend)).encode("a b c d e f")) == 11


def test_special_tokens_and_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert tokenizer.decode([97, end, tokenizer.vocab_size + 7, 98]) == "ab"


def test_a_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(ModelFiles("hf", tmp_path, "model"))


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "Strip"),
        (None, "none"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused_by_name(
    tmp_path: Path, decoder: decoders.Decoder | None, named: str
) -> None:
    backend = byte_level_backend()
    backend.decoder = decoder
    with pytest.raises(ModelError, match=named):
        load_tokenizer(folder_of(tmp_path, backend))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "named", "chat_template.json", "chat_template.jinja"])
def test_the_chat_template_is_found_wherever_hugging_face_puts_it(tmp_path: Path, place: str) -> None:
    config: dict[str, Any] = {}
    if place == "tokenizer_config.json":
        config["chat_template"] = CHATML
    elif place == "named":
        config["chat_template"] = [
            {"name": "tool_use", "template": "{{ 1 / 0 }}"},
            {"name": "default", "template": CHATML},
        ]
    elif place == "chat_template.json":
        (tmp_path / place).write_text(json.dumps({"chat_template": CHATML}))
    else:
        (tmp_path / place).write_text(CHATML)
        config["chat_template"] = "{{ 1 / 0 }}"
    tokenizer = load(folder_of(tmp_path, byte_level_backend(), config))
    assert tokenizer.has_chat_template
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat(HELLO)
    assert ids == tokenizer.encode(expected)
    assert ids[0] == tokenizer.token_id("<|im_start|>")


def test_special_tokens_of_the_config_are_variables_of_the_template_and_added_once(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
    }
    tokenizer = load(folder_of(tmp_path, byte_fallback_backend(), config))
    ids = tokenizer.apply_chat(HELLO)
    assert ids.count(tokenizer.token_id("<s>")) == 1
    assert ids[0] == tokenizer.token_id("<s>")
    assert ids[-1] == tokenizer.token_id("</s>")


def test_chat_without_a_template_is_refused_with_what_to_do_instead() -> None:
    tokenizer = byte_fallback_tokenizer()
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="send text or token_ids"):
        tokenizer.apply_chat(HELLO)


def test_a_chat_template_that_is_no_template_is_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    config = {"chat_template": "{% for %}"}
    with pytest.raises(ModelError, match="chat template is not valid"):
        load_tokenizer(folder_of(tmp_path, byte_level_backend(), config))
