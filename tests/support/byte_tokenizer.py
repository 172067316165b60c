"""A tokenizer without a vocabulary file: ids 0 to 255 are bytes, then BOS and EOS. For tests of everything but text."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.text_stream import ByteLevelStream, TextStream

BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 258


class ByteTokenizer:
    """A tandem.tokenizer.Tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([BOS_ID] if add_special_tokens else []), *text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(_token_bytes, token_ids)).decode(errors="replace")

    def text_stream(self) -> TextStream:
        return ByteLevelStream(_token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return True

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")


def _token_bytes(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < 256 else b""
