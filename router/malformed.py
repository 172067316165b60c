"""① Bytes that are no message at all: refused like any other bad input. Neighbours: app (installs it), status.

grpc itself would answer UNKNOWN with the decoder's words, and log a traceback for each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from router.status import abort
from tandem.errors import InvalidRequest


class MalformedInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers INVALID_ARGUMENT when a request of `service`, whose methods take one message each, cannot be decoded."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Hand the call on to its method, behind the decoder."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        assert not handler.request_streaming, f"{details.method} takes a stream"
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        decode, serve = handler.request_deserializer, getattr(handler, kind)

        def try_to_decode(data: bytes) -> Any:
            try:
                return decode(data)
            except DecodeError:
                return None

        async def serve_decoded(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if request is None:
                await abort(context, InvalidRequest("request", "not a message of this method: malformed protobuf"))
            return await serve(request, context)

        return handler._replace(request_deserializer=try_to_decode, **{kind: serve_decoded})
