"""① GenerationService on gRPC: where the public protobuf ends.

A call is a validator's run, an admission, one lifecycle per choice, and this file's loop that writes what they deliver.
Neighbours: app (wires it), validate, admission, lifecycle, status (errors).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import grpc
import grpc.aio

from router.admission import Admission, Line
from router.answer import Answer
from router.client_stream import ClientStream
from router.lifecycle import Lifecycle
from router.placement import capacity_tokens
from router.ports import Cluster
from router.status import abort
from router.validate import (
    Limits,
    Prompt,
    check_model,
    check_prompt,
    check_request,
    check_token_ids,
    resolve,
)
from tandem.config import ClusterConfig
from tandem.errors import DeadlineExceeded, InvalidRequest, Overloaded, TandemError, Unavailable
from tandem.tokenizer import Tokenizer
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc as rpc

T = TypeVar("T")

# a client that has stopped reading gets this long to take the error
ABORT_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What the service is built over. `tokenizing` runs encoding and templates."""

    config: ClusterConfig
    limits: Limits
    tokenizer: Tokenizer | None
    cluster: Cluster
    line: Line
    admission: Admission
    tokenizing: Executor
    rng: Random


class GenerationServicer(rpc.GenerationServiceServicer):
    """See generation.proto."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._timing = parts.config.timing
        self._streams: set[ClientStream] = set()
        self._largest_seen: int | None = None
        self._draining = False

    def start_draining(self) -> None:
        """Refuse new calls from now on; running ones go on."""
        self._draining = True

    def end_all(self, error: TandemError) -> None:
        """End every running stream with `error`."""
        for stream in list(self._streams):
            stream.fail(error)

    # ---- Generate

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Stream the answer; errors come before the first chunk wherever that is possible."""
        error: Exception | None = None
        try:
            await self._generate(request, context)
        except TimeoutError:
            error = DeadlineExceeded("the deadline passed before the client had read its answer")
        except Exception as exc:
            error = exc
        if error is not None:
            try:
                async with asyncio.timeout(ABORT_PATIENCE_S):
                    await abort(context, error)
            except (TimeoutError, grpc.aio.InternalError):
                # the client has stopped reading (the status waits behind what it has not read) or is gone; grpc takes
                # a handler that is cancelled for over, and any other exception for a bug
                raise asyncio.CancelledError from None

    async def _generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        parts = self._parts
        arrived_at = asyncio.get_running_loop().time()
        remaining_s = context.time_remaining()
        deadline = arrived_at + (self._timing.default_deadline_s if remaining_s is None else remaining_s)
        self._refuse_when_draining()
        checked = check_request(message, parts.limits)
        with parts.admission.admit(checked.request_id) as arrival:
            prompt_token_ids = await self._encode(checked.prompt, deadline)
            request = resolve(
                checked, prompt_token_ids, parts.limits, self._max_request_tokens(), arrival, arrived_at, deadline
            )
            num_choices = 1
            stream = ClientStream(num_choices, request.sampling.seed, parts.config.router.slow_reader_tokens)
            lives = [
                Lifecycle(
                    request,
                    choice,
                    Answer(request, choice, parts.tokenizer, stream),
                    stream,
                    parts.cluster,
                    parts.line,
                    self._timing,
                    parts.config.router.queue_ttl_s,
                    parts.rng,
                )
                for choice in range(num_choices)
            ]
            self._streams.add(stream)
            try:
                await _deliver(stream, lives, context, deadline)
            finally:
                self._streams.discard(stream)

    # ---- the other calls

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        try:
            self._refuse_when_draining()
            check_model(request.model, self._parts.limits)
            prompt = check_prompt(request, self._parts.limits)
            return pb.TokenizeResponse(token_ids=await self._encode(prompt, self._deadline(context)))
        except Exception as exc:
            await abort(context, exc)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        limits, tokenizer = self._parts.limits, self._parts.tokenizer
        try:
            self._refuse_when_draining()
            check_model(request.model, limits)
            if tokenizer is None:
                raise InvalidRequest("model", f"{limits.model.name!r} has no tokenizer")
            check_token_ids("token_ids", request.token_ids, limits)
            ids = list(request.token_ids)
            text = await self._in_thread(lambda: tokenizer.decode(ids), self._deadline(context))
            return pb.DetokenizeResponse(text=text)
        except Exception as exc:
            await abort(context, exc)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        limits = self._parts.limits
        model = pb.Model(
            name=limits.model.name,
            architecture=limits.model.architecture,
            max_model_len=limits.model.max_model_len,
            vocab_size=limits.model.vocab_size,
            has_tokenizer=limits.has_tokenizer,
            has_chat_template=limits.has_chat_template,
            dtype=limits.model.dtype,
        )
        return pb.ListModelsResponse(models=[model])

    # ---- helpers

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("this router is stopping")

    def _deadline(self, context: grpc.aio.ServicerContext) -> float:
        remaining_s = context.time_remaining()
        patience_s = self._timing.default_deadline_s if remaining_s is None else remaining_s
        return asyncio.get_running_loop().time() + patience_s

    def _max_request_tokens(self) -> int | None:
        """What the largest decode worker holds; while there is none, what the largest held that was last seen."""
        decodes = self._parts.cluster.decode_workers
        if decodes:
            self._largest_seen = max(map(capacity_tokens, decodes))
        return self._largest_seen

    async def _encode(self, prompt: Prompt, deadline: float) -> tuple[int, ...]:
        """③ Ids of a prompt. Raises InvalidRequest when the chat template refuses it."""
        if isinstance(prompt, tuple):
            return prompt
        tokenizer = self._parts.tokenizer
        assert tokenizer is not None, "the validator has let text through without a tokenizer"
        if isinstance(prompt, str):
            text = prompt
            return tuple(await self._in_thread(lambda: tokenizer.encode(text), deadline))
        messages = prompt
        return tuple(await self._in_thread(lambda: tokenizer.apply_chat(messages), deadline))

    async def _in_thread(self, work: Callable[[], T], deadline: float) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.get_running_loop().run_in_executor(self._parts.tokenizing, work)
        except TimeoutError as exc:
            raise DeadlineExceeded("the deadline passed during tokenization") from exc


async def _deliver(
    stream: ClientStream, lives: list[Lifecycle], context: grpc.aio.ServicerContext, deadline: float
) -> None:
    """Run the lifecycles and write what they deliver. Raises the error that ended the stream."""
    loop = asyncio.get_running_loop()
    running = [asyncio.create_task(life.run(), name="lifecycle") for life in lives]
    try:
        async with asyncio.timeout_at(deadline + ABORT_PATIENCE_S) as patience:
            stream.on_stalled = lambda: patience.reschedule(loop.time())
            async for response in stream.responses():
                await context.write(response)
    except TimeoutError:
        if isinstance(stream.error, Overloaded):
            raise stream.error from None
        raise
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
