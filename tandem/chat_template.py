"""③ A conversation to the prompt text that a chat model was trained on. Neighbours: tokenizer, router's validator.

Templates come with models and are strangers' programs. They run in jinja2's sandbox (no attributes that lead out of it,
no mutation), with a limit on time, checked in every block that runs (each turn of a loop, each macro), and on the size
of what they build. This keeps a bad template from stalling a router; it is no substitute for a process of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes as ast
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import InvalidRequest, ModelError

MAX_SOURCE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = 4 * 1024 * 1024
RENDER_TIMEOUT_S = 2.0
# integers handed to filters, methods and `*`: widths, counts, exponents
_MAX_COUNT = 100_000
_MAX_REASON_CHARS = 500

_deadline: ContextVar[float] = ContextVar("template_deadline")


class _LimitExceeded(Exception):
    """A template ran too long or built too much."""


class _Refused(Exception):
    """A template called raise_exception: the conversation is not one it was made for."""


class ChatTemplate:
    """A compiled template. Rendering is thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str = "chat template",
        timeout_s: float = RENDER_TIMEOUT_S,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Compile `source`; `special_tokens` (bos_token ...) are its variables, `name` says whose it is in errors.

        Raises ModelError when it is too long or no valid template.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelError(f"{name}: a chat template of {len(source)} characters (at most {MAX_SOURCE_CHARS})")
        self._special_tokens = dict(special_tokens)
        self._timeout_s = timeout_s
        try:
            self._template = _Environment(max_chars).from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as exc:
            raise ModelError(f"{name}: the chat template is not valid: {exc}") from exc

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt: `messages` ({role, content} each), then the beginning of the assistant's answer.

        `variables` are further variables of the template; add_generation_prompt is True unless given.
        Raises InvalidRequest with the template's own words when it refuses the messages, fails or exceeds a limit.
        """
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens, **variables}
        token = _deadline.set(time.monotonic() + self._timeout_s)
        try:
            return self._template.render(messages=[dict(message) for message in messages], **values)
        except _LimitExceeded as exc:
            raise InvalidRequest("chat", f"the chat template {exc}") from exc
        except _Refused as exc:
            raise InvalidRequest(
                "chat", f"the chat template refuses these messages: {str(exc)[:_MAX_REASON_CHARS]}"
            ) from exc
        except Exception as exc:  # a template is a program: it may raise anything, such as TypeError
            raise InvalidRequest(
                "chat", f"the chat template fails: {type(exc).__name__}: {str(exc)[:_MAX_REASON_CHARS]}"
            ) from exc
        finally:
            _deadline.reset(token)


class _CodeGenerator(CodeGenerator):
    """Jinja's compiler with a clock: every block begins by checking the deadline; `~` goes through the size check."""

    def blockvisit(self, nodes: Iterable[ast.Node], frame: Frame) -> None:
        self.writeline("environment.check_time()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: ast.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with what Hugging Face templates expect of it, and the limits."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._max_chars = max_chars
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters = {name: self._limited(function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._to_json
        self.filters["format"] = self._format
        del self.globals["lipsum"]
        self.globals["dict"] = _new_dict
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def check_time(self) -> None:
        """Raise _LimitExceeded when the render's time is over. Called by compiled templates."""
        if time.monotonic() > _deadline.get():
            raise _LimitExceeded("takes too long")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and (isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)):
            many, count = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(count, int):
                self._check_size(len(many) * count)
        elif operator in ("*", "**"):
            self._check_counts((left, right))
        elif operator == "%" and isinstance(left, str):
            self._check_counts(_numbers_in(left))
        return self._checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._check_counts((*args, *kwargs.values()))
        return __self._checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self._check_counts(_numbers_in(value.__self__))
        return wrapped

    def _concat(self, parts: Iterable[str]) -> str:
        pieces, size = [], 0
        for piece in parts:
            size += len(piece)
            self._check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    @jinja2.pass_context
    def _format(self, context: Context, value: str, *args: Any, **kwargs: Any) -> str:
        """Jinja's `format` filter, in which a width inside the format string would be overlooked."""
        text: str = self.call_binop(context, "%", str(value), kwargs or args)
        return text

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON (jinja's own filter escapes for HTML), piece by piece: lists in lists grow exponentially."""
        self._check_counts((indent,))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self._concat(encoder.iterencode(value))

    def _limited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._check_counts((*args, *kwargs.values()))
            return self._checked(function(*args, **kwargs))

        return limited

    def _check_counts(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > _MAX_COUNT:
                raise _LimitExceeded(f"uses a count of {value} (at most {_MAX_COUNT})")
            if isinstance(value, str):
                self._check_size(len(value))

    def _check_size(self, size: int) -> None:
        if size > self._max_chars:
            raise _LimitExceeded(f"builds a text of over {self._max_chars} characters")

    def _checked(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self._check_size(len(value))
        return value


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with `_`, which Python itself may look up."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja's own: `namespace(self=...)` is allowed
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt it is transparent."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[ast.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r} is not allowed as a name in a namespace")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _numbers_in(text: str) -> list[int]:
    digits = "".join(char if char.isdecimal() else " " for char in text)
    return [int(number[:20]) for number in digits.split()]


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
