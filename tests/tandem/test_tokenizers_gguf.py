"""Tokenizers out of GGUF metadata: the cutting rules that a name stands for, special tokens, SentencePiece scores."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.byte_alphabet import CHAR_OF_BYTE
from tandem.errors import ModelError
from tandem.tokenizers_gguf import tokenizer_from_gguf
from tests.support.small_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_gguf
from tests.support.small_tokenizers import CHATML

MERGES = ["1 2", "12 3", "3 4", "Ġ Ġ", "Ġ 1", "a b", "a Ì", "Ġ a", "' s", "' S", "c af"]
EXTRA = ["12", "123", "34", "ĠĠ", "Ġ1", "ab", "aÌ", "Ġa", "'s", "'S"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_metadata(pre: str, **changes: Any) -> dict[str, Any]:
    tokens = [*(CHAR_OF_BYTE[byte] for byte in range(256)), *EXTRA, *SPECIAL, "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[NORMAL] * (256 + len(EXTRA)), *[CONTROL] * 3, USER_DEFINED],
        "tokenizer.ggml.merges": [m for m in MERGES if m.replace(" ", "") in tokens],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": CHATML + "{{ eos_token }}",
    }
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def spelled(path: Path, text: str, pre: str) -> list[str]:
    """The tokens that `text` becomes, as the vocabulary spells them, without BOS."""
    metadata = byte_level_metadata(pre)
    tokenizer = tokenizer_from_gguf(write_gguf(path / f"{pre}.gguf", metadata))
    return [metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # SmolLM: every digit alone, and before the cut into words: spaces before a digit stay together
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("smollm", "  1", ["ĠĠ", "1"]),
        ("smollm", "  a", ["Ġ", "Ġa"]),
        ("smollm", "'s 'S", ["'s", "Ġ", "'", "S"]),
        ("gpt-2", "1234", ["123", "4"]),
        ("gpt-2", "  1", ["Ġ", "Ġ1"]),
        # Llama 3: up to three digits, no space before them, contractions in either case
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama-bpe", "3434", ["34", "3", "4"]),
        ("llama-bpe", " 1", ["Ġ", "1"]),
        ("llama-bpe", "'S", ["'S"]),
        # Qwen 2: every digit alone
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "'S", ["'S"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
    ],
)
def test_text_is_cut_by_the_rules_that_the_name_stands_for(
    tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:
    assert spelled(tmp_path, text, pre) == expected


def test_qwen_composes_characters_first_and_the_others_do_not(tmp_path: Path) -> None:
    decomposed = "e\N{COMBINING ACUTE ACCENT}"
    assert len(spelled(tmp_path, decomposed, "qwen2")) == 2
    assert len(spelled(tmp_path, decomposed, "smollm")) == 3


@pytest.mark.parametrize("pre", ["", "deepseek-coder", "default"])
def test_cutting_rules_that_are_not_known_are_refused_by_name(tmp_path: Path, pre: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", byte_level_metadata(pre))
    with pytest.raises(ModelError, match=rf"pre-tokenizer '{pre}' is not supported .*smollm"):
        tokenizer_from_gguf(path)


def test_a_tokenizer_model_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", byte_level_metadata("smollm", tokenizer__ggml__model="t5"))
    with pytest.raises(ModelError, match="'t5'"):
        tokenizer_from_gguf(path)


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", byte_level_metadata("smollm", **{f"tokenizer__ggml__{key}": None}))
    with pytest.raises(ModelError, match=f"lacks.*{key}"):
        tokenizer_from_gguf(path)


def test_control_tokens_are_matched_whole_and_have_no_text_and_user_defined_ones_have_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "a.gguf", byte_level_metadata("smollm")))
    ids = tokenizer.encode("a<|im_end|><think>b")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a<think>b"


def test_the_chat_template_and_its_special_tokens_come_from_the_metadata(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "a.gguf", byte_level_metadata("smollm")))
    ids = tokenizer.apply_chat([{"role": "user", "content": "ab"}])
    assert ids == tokenizer.encode("<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>")


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_when_the_file_says_so_or_the_family_does(
    tmp_path: Path, pre: str, flag: bool | None, adds: bool
) -> None:
    metadata = byte_level_metadata(pre, tokenizer__ggml__add_bos_token=flag)
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "a.gguf", metadata))
    ids = tokenizer.encode("ab")
    assert (ids[0] == metadata["tokenizer.ggml.bos_token_id"]) == adds
    assert tokenizer.encode("ab", add_special_tokens=False) == (ids[1:] if adds else ids)


# ---- SentencePiece

PIECES = ["▁", "a", "b", "c", "n", "an", "▁b", "▁ban", "ana", "ban", "▁▁", "na", "ab"]


def sentencepiece_metadata(scores: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *PIECES],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)],
        "tokenizer.ggml.scores": [0.0] * 259 + (scores or [-float(i) for i in range(len(PIECES))]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return metadata


def greedy_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: again and again, of all neighbours whose union is a piece, join the best, leftmost."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joins:
            return parts
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(text=st.text("abcn ", min_size=1, max_size=12), order=st.permutations(range(len(PIECES))))
def test_pieces_are_joined_best_score_first(tmp_path: Path, text: str, order: list[int]) -> None:
    metadata = sentencepiece_metadata([-float(rank) for rank in order])
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "s.gguf", metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    expected = greedy_pieces(text, dict(zip(PIECES, [-float(rank) for rank in order], strict=True)))
    assert [tokens[i] for i in tokenizer.encode(text)] == ["<s>", *expected]


def test_characters_outside_the_vocabulary_become_bytes_and_come_back(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "s.gguf", sentencepiece_metadata()))
    ids = tokenizer.encode("ban é😀\n", add_special_tokens=False)
    assert ids[-1] == tokenizer.token_id("<0x0A>")
    assert tokenizer.decode(ids) == "ban é😀\n"


def test_without_a_space_prefix_nothing_is_put_before_the_text(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(tokenizer__ggml__add_space_prefix=False)
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "s.gguf", metadata))
    ids = tokenizer.encode(" a", add_special_tokens=False)
    assert ids == [tokenizer.token_id("▁"), tokenizer.token_id("a")]
    assert tokenizer.decode(ids) == " a"
