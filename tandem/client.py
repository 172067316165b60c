"""A typed client of a Tandem router: async, plain values in and out, errors as `tandem.errors`.

    async with TandemClient("127.0.0.1:50051") as client:
        async for event in client.generate("Once upon a time", max_tokens=32):
            print(event.text, end="")

`tandem.cluster_client` is the operator's side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from tandem import errors
from tandem.types import FinishReason
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc as rpc

CALL_TIMEOUT_S = 30.0
_STATUS_DETAILS = "grpc-status-details-bin"
_PUSHBACK_MS = "grpc-retry-pushback-ms"
_FINISH = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}
_MODES = {pb.SERVING_MODE_DISAGGREGATED: "disaggregated", pb.SERVING_MODE_AGGREGATED: "aggregated"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens with the text they complete. `index`: of the first token in the answer; `seed`: in the first chunk."""

    choice: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as they are counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """A worker that took part."""

    worker_id: str
    pid: int
    node_id: str


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One try; `error` is empty for the one that succeeded."""

    attempt: int
    prefill_worker_id: str
    decode_worker_id: str
    error: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the time went; fields as in generation.proto's Timeline, durations in seconds."""

    mode: str
    queue_s: float
    reserve_s: float
    prefill_s: float
    ttft_s: float
    transfer_s: float
    exposed_transfer_s: float
    commit_s: float
    first_decode_s: float
    total_s: float
    itl_mean_s: float
    attempts: int
    prefill_worker: WorkerRef | None
    decode_worker: WorkerRef | None
    history: tuple[AttemptRecord, ...]
    transfer_nbytes: int
    num_chunks: int
    num_overlapped_chunks: int
    transport: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice, with what was held back until now."""

    choice: int
    reason: FinishReason
    index: int
    token_ids: tuple[int, ...]
    text: str
    usage: Usage
    timeline: Timeline
    stop_string: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    dtype: str


Message = Mapping[str, str]


class TandemClient:
    """`async with TandemClient(address) as client`. Every method raises TandemError."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = rpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        chat: Sequence[Message] | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        ignore_eos: bool = False,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk | Finish, None]:
        """Stream an answer to exactly one of `prompt`, `token_ids` and `chat` ({role, content} each).

        Yields chunks, then one Finish. Closing the generator cancels the request.
        """
        if (prompt is not None) + (token_ids is not None) + (chat is not None) != 1:
            raise errors.InvalidRequest("input", "give exactly one of prompt, token_ids and chat")
        try:
            request = pb.GenerateRequest(
                request_id=request_id,
                model=model,
                text=prompt,
                token_ids=pb.TokenIds(ids=token_ids) if token_ids is not None else None,
                chat=_chat(chat) if chat is not None else None,
                sampling=pb.SamplingParams(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    min_p=min_p,
                    seed=seed,
                    stop=stop,
                    stop_token_ids=stop_token_ids,
                    ignore_eos=ignore_eos,
                ),
            )
        except (ValueError, TypeError) as exc:  # protobuf's: a number that its field cannot hold, another type
            raise errors.InvalidRequest("request", str(exc)) from exc
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield _chunk(response.chunk) if response.HasField("chunk") else _finish(response.finish)
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc
        finally:
            call.cancel()

    async def tokenize(
        self, text: str | None = None, *, chat: Sequence[Message] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> list[int]:
        """Return the ids that a prompt of this text or chat has."""
        request = pb.TokenizeRequest(text=text or "") if chat is None else pb.TokenizeRequest(chat=_chat(chat))
        response: pb.TokenizeResponse = await self._call(self._stub.Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Return the text of ids."""
        try:
            request = pb.DetokenizeRequest(token_ids=token_ids)
        except (ValueError, TypeError) as exc:
            raise errors.InvalidRequest("token_ids", str(exc)) from exc
        response: pb.DetokenizeResponse = await self._call(self._stub.Detokenize, request, timeout_s)
        return response.text

    async def models(self, timeout_s: float = CALL_TIMEOUT_S) -> list[Model]:
        """Return the served models."""
        response: pb.ListModelsResponse = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return [
            Model(
                name=m.name,
                architecture=m.architecture,
                max_model_len=m.max_model_len,
                vocab_size=m.vocab_size,
                has_tokenizer=m.has_tokenizer,
                has_chat_template=m.has_chat_template,
                dtype=m.dtype,
            )
            for m in response.models
        ]

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc


def error_of(exc: grpc.aio.AioRpcError) -> errors.TandemError:
    """The TandemError that a router's status stands for; the message is the server's own."""
    code, details = exc.code(), exc.details() or ""
    metadata = {key: value for key, value in exc.trailing_metadata() or ()}
    _, _, message = details.partition(": ")
    status = grpc.StatusCode
    match code:
        case status.INVALID_ARGUMENT:
            return errors.InvalidRequest(_field(metadata, details), message)
        case status.NOT_FOUND:
            return errors.UnknownModel(_field(metadata, details), message)
        case status.UNIMPLEMENTED:
            return errors.Unimplemented(_field(metadata, details), message)
        case status.RESOURCE_EXHAUSTED:
            return errors.Overloaded(details, int(metadata.get(_PUSHBACK_MS, 1000)) / 1000)
        case status.ALREADY_EXISTS:
            return errors.DuplicateRequest(details)
        case status.UNAUTHENTICATED:
            return errors.Unauthenticated(details)
        case status.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(details)
        case status.CANCELLED:
            return errors.Cancelled(details)
        case status.UNAVAILABLE:
            return errors.Unavailable(details)
        case _:
            return errors.TandemError(f"{code.name}: {details}")


def _field(metadata: Mapping[str, Any], details: str) -> str:
    """The field that an error names: from its BadRequest detail, else from the message itself."""
    if packed := metadata.get(_STATUS_DETAILS):
        for detail in status_pb2.Status.FromString(packed).details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request) and bad_request.field_violations:
                return str(bad_request.field_violations[0].field)
    return details.partition(": ")[0]


def _chat(messages: Sequence[Message]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages])


def _chunk(chunk: pb.Chunk) -> Chunk:
    seed = chunk.seed if chunk.HasField("seed") else None
    return Chunk(chunk.choice, chunk.index, tuple(chunk.token_ids), chunk.text, seed)


def _finish(finish: pb.Finish) -> Finish:
    usage = finish.usage
    return Finish(
        choice=finish.choice,
        reason=_FINISH[finish.reason],
        index=finish.index,
        token_ids=tuple(finish.token_ids),
        text=finish.text,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        timeline=_timeline(finish.timeline),
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
    )


def _timeline(timeline: pb.Timeline) -> Timeline:
    return Timeline(
        mode=_MODES.get(timeline.mode, ""),
        queue_s=timeline.queue_s,
        reserve_s=timeline.reserve_s,
        prefill_s=timeline.prefill_s,
        ttft_s=timeline.ttft_s,
        transfer_s=timeline.transfer_s,
        exposed_transfer_s=timeline.exposed_transfer_s,
        commit_s=timeline.commit_s,
        first_decode_s=timeline.first_decode_s,
        total_s=timeline.total_s,
        itl_mean_s=timeline.itl_mean_s,
        attempts=timeline.attempts,
        prefill_worker=_worker(timeline.prefill_worker),
        decode_worker=_worker(timeline.decode_worker),
        history=tuple(
            AttemptRecord(a.attempt, a.prefill_worker_id, a.decode_worker_id, a.error) for a in timeline.history
        ),
        transfer_nbytes=timeline.transfer_nbytes,
        num_chunks=timeline.num_chunks,
        num_overlapped_chunks=timeline.num_overlapped_chunks,
        transport=timeline.transport,
    )


def _worker(worker: pb.WorkerRef) -> WorkerRef | None:
    return WorkerRef(worker.worker_id, worker.pid, worker.node_id) if worker.worker_id else None
