"""① Errors at the gRPC edge: one mapper from `tandem.errors` to a status with google.rpc details."""

from __future__ import annotations

import logging
import secrets
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.errors import InvalidRequest, Overloaded, TandemError, Unimplemented

log = logging.getLogger(__name__)

PUSHBACK_METADATA_KEY = "grpc-retry-pushback-ms"


async def abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """End the call with `error`'s status. What is INTERNAL gets an id that is in the log, and says no more."""
    if not isinstance(error, TandemError) or error.grpc_status is grpc.StatusCode.INTERNAL:
        error_id = secrets.token_hex(4)
        log.error("internal error %s", error_id, exc_info=error)
        error = TandemError(f"internal error {error_id}, see the router's log")
    message = str(error)
    status = status_pb2.Status(code=error.grpc_status.value[0], message=message)
    metadata: list[tuple[str, str | bytes]] = []
    if isinstance(error, InvalidRequest | Unimplemented):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message.removeprefix(f"{error.field}: ")
        )
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        _add(status, retry)
        metadata.append((PUSHBACK_METADATA_KEY, str(round(error.retry_after_s * 1000))))
    packed = rpc_status.to_status(status)
    await context.abort(packed.code, packed.details, (*metadata, *packed.trailing_metadata))
    raise AssertionError("abort raises")


def _add(status: status_pb2.Status, detail: error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
