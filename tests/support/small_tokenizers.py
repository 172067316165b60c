"""Tiny tokenizers of the two kinds that are served; their tokens cut characters and stop strings in awkward places."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from tandem.byte_alphabet import CHAR_OF_BYTE
from tandem.chat_template import ChatTemplate
from tandem.tokenizer import TextTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# pieces of byte-level tokens: half characters at either end, stop strings, spaces
BYTE_LEVEL_PIECES = [
    b"he",
    b"llo",
    b" wor",
    b"ld",
    b"ST",
    b"OP",
    b"xSTOPy",
    b"x\xc3",
    b"\xa9y\xf0\x9f",
    b"\x98\x80",
    b"\xe2\x82",
    b"\xac!",
    b"\n\n",
]
SENTENCEPIECE_PIECES = ["▁", "▁he", "llo", "ST", "OP", "xSTOPy", "▁▁", "é", "\n", "y"]


def byte_level_backend() -> HFTokenizer:
    """256 bytes, BYTE_LEVEL_PIECES, an added token that is plain text and three special ones."""
    vocab = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
    for piece in BYTE_LEVEL_PIECES:
        vocab["".join(CHAR_OF_BYTE[byte] for byte in piece)] = len(vocab)
    backend = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("plain text", normalized=False, special=False)])
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return backend


def byte_fallback_backend(strip: bool = True) -> HFTokenizer:
    """<unk> <s> </s>, 256 byte tokens, SENTENCEPIECE_PIECES and ASCII letters; BOS is added."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_PIECES]
    vocab = {token: token_id for token_id, token in enumerate(dict.fromkeys([*tokens, *"helSTOPx"]))}
    backend = HFTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_level_tokenizer() -> TextTokenizer:
    return TextTokenizer(byte_level_backend(), ChatTemplate(CHATML, {}), "byte-level")


def byte_fallback_tokenizer(strip: bool = True) -> TextTokenizer:
    return TextTokenizer(byte_fallback_backend(strip), None, "byte-fallback")
