"""How the command line speaks: results on stdout, the rest on stderr; errors in a line or two, with a next step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console

from tandem.errors import TandemError

P = ParamSpec("P")
T = TypeVar("T")
stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class OutputFormat(StrEnum):
    """Of what a command shows."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[OutputFormat, typer.Option("-o", "--output", help="text for people, json for programs")]


def show_json(value: Any) -> None:
    """Print one JSON document to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def show_error(message: str) -> None:
    """Print an error to stderr."""
    stderr.print(f"[bold red]error:[/] {_escape(message)}")


def fail(message: str, hint: str = "") -> NoReturn:
    """End the command with an error message and, on a second line, what to do."""
    show_error(message)
    if hint:
        stderr.print(f"[dim]{_escape(hint)}[/]")
    raise typer.Exit(EXIT_FAILED)


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turn the errors that Tandem raises on purpose into `fail`. Anything else is a bug and keeps its traceback."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except TandemError as exc:
            fail(str(exc))
        except KeyboardInterrupt:
            stderr.print("[yellow]interrupted[/]")
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return wrapped


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
