"""③⑨ Text to token ids and back. Neighbours: chat_template, text_stream (incremental), tokenizers_gguf, router.

Uses the `tokenizers` library; `transformers` is not needed to serve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as HFTokenizer

from tandem.byte_alphabet import BYTE_OF_CHAR
from tandem.chat_template import ChatTemplate
from tandem.errors import InvalidRequest, ModelError
from tandem.model_files import ModelFiles, read_json
from tandem.text_stream import ByteFallbackStream, ByteLevelStream, TextStream


class Tokenizer(Protocol):
    """What the router needs of a vocabulary. Thread-safe: encoding runs in a thread pool."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with BOS where the model wants one. Special tokens in the text are recognised."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids. Special tokens and ids outside the vocabulary have none; invalid UTF-8 is U+FFFD."""
        ...

    def text_stream(self) -> TextStream:
        """Return a new incremental decoder: what it gives in all is what `decode` gives."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can be used."""
        ...

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the ids of a conversation ({role, content} each), ending where the assistant's answer begins.

        Raises InvalidRequest when there is no template, or it refuses the messages.
        """
        ...


def load_tokenizer(files: ModelFiles) -> Tokenizer | None:
    """Return the model's tokenizer; None if a folder has no tokenizer.json (it then serves token ids only).

    Raises ModelError naming a tokenizer that is damaged or of a kind that is not supported.
    """
    if files.kind == "gguf":
        from tandem.tokenizers_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(files.path)
    path = files.path / "tokenizer.json"
    return _from_folder(files.path) if path.is_file() else None


class TextTokenizer:
    """A `tokenizers` tokenizer with its chat template. The Tokenizer protocol says what the methods do."""

    def __init__(self, backend: HFTokenizer, chat_template: ChatTemplate | None, source: str) -> None:
        """Raise ModelError if the decoder is of a kind that cannot be streamed; `source` names the files in it."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._new_stream = _stream_factory(json.loads(backend.to_str())["decoder"], self._token_text, source)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def text_stream(self) -> TextStream:
        return self._new_stream()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's own vocabulary may be padded to more."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self._chat_template is None:
            raise InvalidRequest("chat", "this model has no chat template; send text or token_ids")
        return self.encode(self._chat_template.render(messages), add_special_tokens=False)

    def _token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if it has no text: special, or not in the vocabulary."""
        if token_id in self._special_ids:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


def _stream_factory(
    decoder: dict[str, Any] | None, token_text: Callable[[int], str | None], source: str
) -> Callable[[], TextStream]:
    """Return a maker of streams that decode as `decoder` (the section of that name in tokenizer.json) does."""
    steps = _flat_steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        token_bytes = _byte_level_bytes(token_text)
        return lambda: ByteLevelStream(token_bytes)
    replacements: list[tuple[str, str]] = []
    while kinds[:1] == ["Replace"] and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps, kinds = steps[1:], kinds[1:]
    if kinds[:2] == ["ByteFallback", "Fuse"]:
        token = _byte_fallback_token(token_text, replacements)
        if not kinds[2:]:
            return lambda: ByteFallbackStream(token)
        if kinds[2:] == ["Strip"] and steps[2]["stop"] == 0:
            content, num_strip = steps[2]["content"], steps[2]["start"]
            return lambda: ByteFallbackStream(token, content, num_strip)
    found = " + ".join(step["type"] for step in _flat_steps(decoder)) or "none"
    raise ModelError(
        f"{source}: decoder {found} is not supported "
        "(ByteLevel, or Replace + ByteFallback + Fuse with or without Strip, are)"
    )


def _flat_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat_steps(part)]
    return [decoder]


def _byte_level_bytes(token_text: Callable[[int], str | None]) -> Callable[[int], bytes]:
    def token_bytes(token_id: int) -> bytes:
        text = token_text(token_id)
        if text is None:
            return b""
        try:
            return bytes([BYTE_OF_CHAR[char] for char in text])
        except KeyError:  # an added token, spelled as it is
            return text.encode()

    return token_bytes


def _byte_fallback_token(
    token_text: Callable[[int], str | None], replacements: list[tuple[str, str]]
) -> Callable[[int], str | int | None]:
    def token(token_id: int) -> str | int | None:
        text = token_text(token_id)
        if text is None:
            return None
        for old, new in replacements:
            text = text.replace(old, new)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return int(text[3:5], 16)
            except ValueError:
                return text
        return text

    return token


def _from_folder(folder: Path) -> TextTokenizer:
    path = folder / "tokenizer.json"
    try:
        backend = HFTokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception
        raise ModelError(f"{path}: {exc}") from exc
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    source = _chat_template_source(folder, config)
    template = ChatTemplate(source, special_tokens=_special_tokens(config), name=str(folder)) if source else None
    return TextTokenizer(backend, template, str(path))


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template: chat_template.jinja, chat_template.json or the one in tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ModelError(f"{jinja}: {exc}") from exc
    legacy = folder / "chat_template.json"
    template = read_json(legacy).get("chat_template") if legacy.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ... as templates see them; tokenizer_config.json spells them as text or as an AddedToken."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
