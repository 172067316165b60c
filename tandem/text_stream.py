"""Token ids to text one id at a time, exactly as decoding them all at once would. Neighbours: tokenizer, router's ⑨.

Two kinds of vocabulary are served: byte-level BPE (Llama 3, SmolLM2, Qwen: a token is any bytes) and SentencePiece
with byte fallback (Llama 2, Mistral: a token is text, or one byte of a character the vocabulary lacks).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream(Protocol):
    """Decodes one answer. An id is unsettled while text that it takes part in is not certain yet."""

    def push(self, token_id: int) -> list[str]:
        """Take the next id; return the texts of the oldest unsettled ids that are certain now, one per id, in order.

        The text of an id is the characters that it completes; ids of special tokens have empty text.
        """
        ...

    def tentative(self) -> list[str]:
        """Return what each unsettled id has completed if the answer ends here; half characters are left out."""
        ...

    def finish(self) -> list[str]:
        """Return the texts of all unsettled ids; the answer ends here."""
        ...


class ByteLevelStream:
    """Tokens are bytes: their concatenation is UTF-8, and what is invalid in it becomes U+FFFD."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unsettled: list[str] = []

    def push(self, token_id: int) -> list[str]:
        self._unsettled.append(self._decoder.decode(self._token_bytes(token_id)))
        half_character, _ = self._decoder.getstate()
        return [] if half_character else self._take()

    def tentative(self) -> list[str]:
        return self._unsettled.copy()

    def finish(self) -> list[str]:
        if self._unsettled:
            self._unsettled[-1] += self._decoder.decode(b"", final=True)
        return self._take()

    def _take(self) -> list[str]:
        texts, self._unsettled = self._unsettled, []
        return texts


class ByteFallbackStream:
    """Tokens are text or single bytes. A run of byte tokens is text if it is valid UTF-8, else U+FFFD per byte.

    That rule (of the `tokenizers` library) makes a run certain only when it has ended, so its ids stay unsettled until
    then. `token` gives a token's text, its byte, or None for a token without text (which does not end a run).
    """

    def __init__(self, token: Callable[[int], str | int | None], strip_left: str = "", num_strip: int = 0) -> None:
        self._token = token
        self._run: list[int | None] = []
        self._strip_left = strip_left
        self._num_strip = num_strip

    def push(self, token_id: int) -> list[str]:
        token = self._token(token_id)
        if isinstance(token, int) or (token is None and self._run):
            self._run.append(token)
            return []
        return [*self.finish(), "" if token is None else self._stripped(token)]

    def tentative(self) -> list[str]:
        texts = _run_texts(self._run)
        if texts is None:
            return ["" for _ in self._run]
        num_strip = self._num_strip
        stripped = [self._stripped(text) for text in texts]
        self._num_strip = num_strip
        return stripped

    def finish(self) -> list[str]:
        texts = _run_texts(self._run, final=True)
        if texts is None:
            texts = ["" if byte is None else REPLACEMENT for byte in self._run]
        self._run.clear()
        return [self._stripped(text) for text in texts]

    def _stripped(self, text: str) -> str:
        """Drop the decoder's leading spaces: at most `num_strip`, at the beginning of the answer only."""
        while self._num_strip and text:
            if not text.startswith(self._strip_left):
                self._num_strip = 0
                break
            text = text.removeprefix(self._strip_left)
            self._num_strip -= 1
        return text


def _run_texts(run: list[int | None], final: bool = False) -> list[str] | None:
    """The characters that each byte of a run completes; None if it is not UTF-8 (when `final`, up to its end)."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        texts = ["" if byte is None else decoder.decode(bytes([byte])) for byte in run]
        decoder.decode(b"", final=final)
    except UnicodeDecodeError:
        return None
    return texts
