"""`tandem generate` and `tandem chat`: the client's side, over gRPC like any other client."""

from __future__ import annotations

import sys
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from deploy.cli.app import app, running_cluster
from deploy.cli.interrupt import Terminated, raise_on_signals, run
from deploy.cli.output import Output, OutputFormat, fail, reports_errors, show_error, show_json, stderr
from deploy.cli.timeline import timeline_line
from tandem.client import Chunk, Finish, TandemClient
from tandem.errors import TandemError

MaxTokens = Annotated[int | None, typer.Option(min=1, help="length of the answer at most; default: what fits")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default 1")]
TopP = Annotated[float | None, typer.Option(help="nucleus sampling; default 1")]
TopK = Annotated[int | None, typer.Option(help="0 or -1: off")]
Seed = Annotated[int | None, typer.Option(min=0, help="repeats an answer; drawn by the server otherwise")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="go on after an end-of-text token")]


@dataclass(slots=True)
class Answer:
    """What has come back so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    seed: int | None = None
    finish: Finish | None = None

    def add(self, event: Chunk | Finish) -> None:
        """Take an event of the stream."""
        self.token_ids.extend(event.token_ids)
        self.text += event.text
        if isinstance(event, Finish):
            self.finish = event
        elif event.seed is not None:
            self.seed = event.seed


@app.command()
@reports_errors
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="text to continue")] = None,
    token_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="the prompt as token ids")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    ignore_eos: IgnoreEos = False,
    request_id: Annotated[str, typer.Option(help="chosen by the server when empty")] = "",
    output: Output = OutputFormat.TEXT,
) -> None:
    """Continue a text and stream it to the terminal.

    For example:

      tandem generate "The capital of France is" --max-tokens 16 --temperature 0

      tandem generate --token-ids 1,2,3 -o json
    """
    if (prompt is None) == (token_ids is None):
        fail("give either PROMPT or --token-ids", 'for example: tandem generate "Once upon a time"')
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "request_id": request_id,
    }
    ids = None if token_ids is None else parse_ids(token_ids)
    rec = running_cluster(context)
    answer = Answer()
    echo = output is OutputFormat.TEXT
    run(stream_answer(rec.grpc_address, answer, echo=echo, prompt=prompt, token_ids=ids, **sampling))
    if not echo:
        show_json(answer_to_dict(answer))
    elif answer.finish is not None:
        if not answer.text:  # a model without a tokenizer
            sys.stdout.write(",".join(map(str, answer.token_ids)))
        print(flush=True)
        stderr.print(f"[dim]{timeline_line(answer.finish)}[/]")


@app.command()
@reports_errors
def chat(
    context: typer.Context,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
) -> None:
    """Talk to the model. It remembers the conversation; Ctrl-C ends an answer, not the chat.

    /reset forgets the conversation, /exit or Ctrl-D leaves.
    """
    rec = running_cluster(context)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    stderr.print(f"[bold]{rec.model}[/]  [dim]/reset forgets, /exit leaves, Ctrl-C ends an answer[/]")
    history: list[dict[str, str]] = []
    raise_on_signals()
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            print()
            stderr.print("[dim]/exit leaves[/]")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            history.clear()
        elif line.startswith("/"):
            stderr.print("[dim]/reset forgets the conversation, /exit leaves[/]")
        elif line:
            _turn(rec.grpc_address, history, line, sampling)


def _turn(address: str, history: list[dict[str, str]], line: str, sampling: dict[str, Any]) -> None:
    """One question and its answer. A turn without any answer is not remembered."""
    asked = [*history, {"role": "user", "content": line}]
    answer = Answer()
    try:
        run(stream_answer(address, answer, echo=True, chat=asked, **sampling))
        print(flush=True)
    except Terminated:
        raise
    except KeyboardInterrupt:
        print(flush=True)
        stderr.print("[yellow]cancelled[/]")
    except TandemError as exc:
        print(flush=True)
        show_error(str(exc))
    if answer.finish is not None:
        stderr.print(f"[dim]{timeline_line(answer.finish)}[/]")
    if answer.text:
        history[:] = [*asked, {"role": "assistant", "content": answer.text}]


async def stream_answer(address: str, answer: Answer, *, echo: bool, **request: Any) -> None:
    """Stream an answer into `answer`, and to stdout as it comes. Cancelling this cancels the request."""
    async with TandemClient(address) as client, aclosing(client.generate(**request)) as events:
        async for event in events:
            answer.add(event)
            if echo:
                sys.stdout.write(event.text)
                sys.stdout.flush()


def answer_to_dict(answer: Answer) -> dict[str, Any]:
    """What `generate -o json` prints."""
    finish = answer.finish
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "seed": answer.seed,
        "finish_reason": finish.reason.value if finish else None,
        "usage": asdict(finish.usage) if finish else None,
        "timeline": asdict(finish.timeline) if finish else None,
    }


def parse_ids(text: str) -> list[int]:
    """`1,2,3` -> [1, 2, 3]; ends the command with a hint otherwise."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < 2**32 for part in parts):
        fail(f"--token-ids {text!r}: expected ids such as 1,2,3")
    return [int(part) for part in parts]
