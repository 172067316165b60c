"""The cluster secret at the door of an internal gRPC server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.wire import secret_matches

_HEALTH = "/grpc.health.v1.Health/"


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without the cluster secret in its metadata, health checks excepted."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Hand the call on, or answer UNAUTHENTICATED in the shape of the method that was called."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_HEALTH):
            return handler
        if secret_matches(self._secret, details.invocation_metadata):
            return handler

        async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong cluster secret")

        async def refuse_stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong cluster secret")
            yield  # makes this a generator; never reached

        if handler.request_streaming:
            return (
                grpc.stream_stream_rpc_method_handler(refuse_stream)
                if handler.response_streaming
                else grpc.stream_unary_rpc_method_handler(refuse)
            )
        return (
            grpc.unary_stream_rpc_method_handler(refuse_stream)
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler(refuse)
        )
