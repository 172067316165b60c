"""Builds a tokenizer from a GGUF file's metadata. Neighbours: tokenizer (uses it), gguf_metadata (reads the file).

GGUF names how text is cut up before BPE (`tokenizer.ggml.pre`) instead of carrying the rules. A name that is not known
here is refused: other rules would give other ids, and an answer that is quietly worse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from tandem.chat_template import ChatTemplate
from tandem.errors import ModelError
from tandem.gguf_metadata import read_gguf_metadata
from tandem.tokenizer import TextTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_SPACE = "▁"

# Sources: the tokenizer.json of each family; llama.cpp, src/llama-vocab.cpp
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_GPT2_RULES = ("smollm", "gpt-2", "gpt2")


def tokenizer_from_gguf(path: Path) -> TextTokenizer:
    """Return the tokenizer and chat template that a GGUF file describes.

    Raises ModelError naming a tokenizer model or pre-tokenizer that is not supported, or a missing key.
    """
    metadata = read_gguf_metadata(path)
    model = metadata.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            backend = _byte_level(metadata, path)
        elif model == "llama":
            backend = _sentencepiece(metadata)
        else:
            raise ModelError(f"{path}: tokenizer model {model!r} is not supported (gpt2 and llama are)")
        tokens = metadata["tokenizer.ggml.tokens"]
        _add_special_tokens(backend, tokens, metadata["tokenizer.ggml.token_type"])
        special_tokens = {
            name: tokens[metadata[f"tokenizer.ggml.{key}"]]
            for name, key in _SPECIAL_IDS.items()
            if metadata.get(f"tokenizer.ggml.{key}") is not None
        }
        _add_bos_and_eos(backend, metadata, special_tokens)
    except (KeyError, IndexError) as exc:
        raise ModelError(f"{path}: the GGUF metadata lacks {exc}") from exc
    source = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, special_tokens, name=str(path)) if source else None
    return TextTokenizer(backend, template, str(path))


_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _byte_level(metadata: dict[str, Any], path: Path) -> HFTokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "")
    if pre not in _SPLITS and pre not in _GPT2_RULES:
        known = ", ".join(sorted([*_SPLITS, *_GPT2_RULES]))
        raise ModelError(f"{path}: pre-tokenizer {pre!r} is not supported (known: {known})")
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = HFTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in _GPT2_RULES)
    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in _GPT2_RULES:
        backend.pre_tokenizer = byte_level
    else:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any]) -> HFTokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unk_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = HFTokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, metadata["tokenizer.ggml.scores"]),
            unk_token=tokens[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    decoder_steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decoder_steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(decoder_steps)
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's rule: of neighbours whose union is a token, join the best-scored first."""
    merges = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[token_id], left, right))
    merges.sort(key=lambda merge: (merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(backend: HFTokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are matched whole in text: control tokens have no text of their own, user-defined ones do."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _add_bos_and_eos(backend: HFTokenizer, metadata: dict[str, Any], special_tokens: dict[str, str]) -> None:
    adds_bos_by_default = (
        metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    )  # llama.cpp's rule for files that do not say
    begin, end = "", ""
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default):
        begin = special_tokens["bos_token"]
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        end = special_tokens["eos_token"]
    used = [token for token in (begin, end) if token]
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([begin] if begin else []), "$A", *([end] if end else [])],
            special_tokens=[(token, backend.token_to_id(token)) for token in used],
        )
