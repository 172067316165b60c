from __future__ import annotations

import pytest

from tandem.messages import (
    Committed,
    Credit,
    CreditGranted,
    Failed,
    FailureReason,
    Finished,
    FirstToken,
    Heartbeat,
    Preempted,
    Prefill,
    PromptSegment,
    RefusalReason,
    Refused,
    Release,
    ReservationGranted,
    Reserve,
    Resync,
    RouterMessage,
    Step,
    StepRow,
    WorkerMessage,
)
from tandem.session_wire import fill_request, fill_response, read_request, read_response
from tandem.types import FinishReason, LoadReport, PeerEndpoint, RequestKey, Sampling
from tandem.v1 import worker_pb2 as pb

KEY = RequestKey("r", 2, 3)
SAMPLING = Sampling(5, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=1 << 63, stop_token_ids=(2, 3))
PEER = PeerEndpoint("prefill-0", 1 << 63, "127.0.0.1:1", "node", "shm", "127.0.0.1:2")

REQUESTS: list[RouterMessage] = [
    Resync((KEY, RequestKey("s", 0, 1))),
    Resync(()),
    Heartbeat(),
    PromptSegment(KEY, 3, (1, 2)),
    Credit(KEY, 5, solo=True),
    Reserve(KEY, (1, 2), 4, 3, SAMPLING, PEER, b"capability"),
    Reserve(KEY, (1,), 1, 1, SAMPLING, local_prefill=True),
    Prefill(KEY, (1, 2), 4, 3, SAMPLING),
    Release(KEY),
]
RESPONSES: list[WorkerMessage] = [
    LoadReport(1, 2, 3, 4, 5, 6, 0.5, True),
    CreditGranted(KEY, 10.0, b"capability", 16),
    ReservationGranted(KEY, 10.0, 16),
    *(Refused(KEY, reason, "why") for reason in RefusalReason),
    FirstToken(KEY, 1, 2, 0.5, 0.25, 3, 4, 5),
    Committed(KEY, 0.5, 0.25, 1 << 40, 3, "shm"),
    Step((StepRow(KEY, 7, (1, 2)), StepRow(RequestKey("s", 0, 1), 0, (3,)))),
    *(Finished(KEY, reason, 3, 0.5, 0.25) for reason in FinishReason),
    *(Failed(KEY, reason, "why", "prefill-0") for reason in FailureReason),
    Preempted(KEY),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_what_a_router_says_survives_the_wire(message: RouterMessage) -> None:
    request = pb.SessionRequest()
    fill_request(request, message)
    assert read_request(pb.SessionRequest.FromString(request.SerializeToString())) == message


@pytest.mark.parametrize("message", RESPONSES, ids=lambda m: type(m).__name__)
def test_what_a_worker_says_survives_the_wire(message: WorkerMessage) -> None:
    response = pb.SessionResponse()
    fill_response(response, message)
    assert read_response(pb.SessionResponse.FromString(response.SerializeToString())) == message


def test_every_body_of_the_protocol_is_covered() -> None:
    for envelope, messages, fill in (
        (pb.SessionRequest, REQUESTS, fill_request),
        (pb.SessionResponse, RESPONSES, fill_response),
    ):
        seen = set()
        for message in messages:
            filled = envelope()
            fill(filled, message)  # type: ignore[operator]
            seen.add(filled.WhichOneof("body"))
        assert seen == {field.name for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields}


def test_an_empty_body_is_none() -> None:
    assert read_request(pb.SessionRequest()) is None
    assert read_response(pb.SessionResponse()) is None
