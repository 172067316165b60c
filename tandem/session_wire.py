"""`tandem/messages.py` to the bodies of SessionRequest and SessionResponse, and back. Used at both ends of ④."""

from __future__ import annotations

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
from tandem.types import FinishReason, LoadReport
from tandem.v1 import worker_pb2 as pb
from tandem.wire import (
    endpoint_from_wire,
    endpoint_to_wire,
    key_from_wire,
    key_to_wire,
    load_from_wire,
    load_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)

_FINISH = {FinishReason.STOP: pb.ENGINE_FINISH_REASON_STOP, FinishReason.LENGTH: pb.ENGINE_FINISH_REASON_LENGTH}
_FINISH_BACK = {v: k for k, v in _FINISH.items()}
_REFUSAL_BACK = {int(reason): reason for reason in RefusalReason}
_FAILURE_BACK = {int(reason): reason for reason in FailureReason}


def fill_request(request: pb.SessionRequest, message: RouterMessage) -> None:
    """Set the body of `request` to `message`; the envelope stays the caller's."""
    match message:
        case Heartbeat():
            request.heartbeat.SetInParent()
        case Resync(live):
            request.resync.SetInParent()
            request.resync.live.extend(key_to_wire(key) for key in live)
        case PromptSegment(key, offset, token_ids):
            request.prompt_segment.CopyFrom(pb.PromptSegment(key=key_to_wire(key), offset=offset, token_ids=token_ids))
        case Credit(key, num_tokens, solo):
            request.credit.CopyFrom(pb.Credit(key=key_to_wire(key), num_tokens=num_tokens, solo=solo))
        case Reserve():
            request.reserve.CopyFrom(
                pb.Reserve(
                    key=key_to_wire(message.key),
                    token_ids=message.token_ids,
                    num_tokens=message.num_tokens,
                    num_prompt_tokens=message.num_prompt_tokens,
                    sampling=sampling_to_wire(message.sampling),
                    peer=endpoint_to_wire(message.peer) if message.peer else None,
                    capability=message.capability,
                    local_prefill=message.local_prefill,
                )
            )
        case Prefill():
            request.prefill.CopyFrom(
                pb.Prefill(
                    key=key_to_wire(message.key),
                    token_ids=message.token_ids,
                    num_tokens=message.num_tokens,
                    num_prompt_tokens=message.num_prompt_tokens,
                    sampling=sampling_to_wire(message.sampling),
                )
            )
        case Release(key):
            request.release.CopyFrom(pb.Release(key=key_to_wire(key)))


def read_request(request: pb.SessionRequest) -> RouterMessage | None:
    """The body of `request`; None for one this build does not know."""
    match request.WhichOneof("body"):
        case "heartbeat":
            return Heartbeat()
        case "resync":
            return Resync(tuple(key_from_wire(key) for key in request.resync.live))
        case "prompt_segment":
            s = request.prompt_segment
            return PromptSegment(key_from_wire(s.key), s.offset, tuple(s.token_ids))
        case "credit":
            return Credit(key_from_wire(request.credit.key), request.credit.num_tokens, request.credit.solo)
        case "reserve":
            r = request.reserve
            return Reserve(
                key=key_from_wire(r.key),
                token_ids=tuple(r.token_ids),
                num_tokens=r.num_tokens,
                num_prompt_tokens=r.num_prompt_tokens,
                sampling=sampling_from_wire(r.sampling),
                peer=endpoint_from_wire(r.peer) if r.HasField("peer") else None,
                capability=r.capability,
                local_prefill=r.local_prefill,
            )
        case "prefill":
            p = request.prefill
            return Prefill(
                key=key_from_wire(p.key),
                token_ids=tuple(p.token_ids),
                num_tokens=p.num_tokens,
                num_prompt_tokens=p.num_prompt_tokens,
                sampling=sampling_from_wire(p.sampling),
            )
        case "release":
            return Release(key_from_wire(request.release.key))
        case _:
            return None


def fill_response(response: pb.SessionResponse, message: WorkerMessage) -> None:
    """Set the body of `response` to `message`; the envelope stays the caller's."""
    match message:
        case LoadReport():
            response.load_report.CopyFrom(load_to_wire(message))
        case CreditGranted(key, lease_s, capability, cached):
            response.credit_granted.CopyFrom(
                pb.CreditGranted(key=key_to_wire(key), lease_s=lease_s, capability=capability, num_cached_tokens=cached)
            )
        case ReservationGranted(key, lease_s, cached):
            response.reservation_granted.CopyFrom(
                pb.ReservationGranted(key=key_to_wire(key), lease_s=lease_s, num_cached_tokens=cached)
            )
        case Refused(key, reason, detail):
            response.refused.CopyFrom(
                pb.Refused(key=key_to_wire(key), reason=pb.RefusalReason.Name(reason), detail=detail)
            )
        case FirstToken():
            response.first_token.CopyFrom(
                pb.FirstToken(
                    key=key_to_wire(message.key),
                    index=message.index,
                    token_id=message.token_id,
                    queue_s=message.queue_s,
                    prefill_s=message.prefill_s,
                    num_computed_tokens=message.num_computed_tokens,
                    num_chunks=message.num_chunks,
                    num_overlapped_chunks=message.num_overlapped_chunks,
                )
            )
        case Committed():
            response.committed.CopyFrom(
                pb.Committed(
                    key=key_to_wire(message.key),
                    transfer_s=message.transfer_s,
                    exposed_transfer_s=message.exposed_transfer_s,
                    nbytes=message.nbytes,
                    num_chunks=message.num_chunks,
                    transport=message.transport,
                )
            )
        case Step(rows):
            response.step.CopyFrom(
                pb.Step(rows=[pb.StepRow(key=key_to_wire(r.key), index=r.index, token_ids=r.token_ids) for r in rows])
            )
        case Finished():
            response.finished.CopyFrom(
                pb.Finished(
                    key=key_to_wire(message.key),
                    reason=_FINISH[message.reason],
                    num_output_tokens=message.num_output_tokens,
                    queue_s=message.queue_s,
                    prefill_s=message.prefill_s,
                )
            )
        case Failed(key, failure, detail, peer_worker_id):
            response.failed.CopyFrom(
                pb.Failed(
                    key=key_to_wire(key),
                    reason=pb.FailureReason.Name(failure),
                    detail=detail,
                    peer_worker_id=peer_worker_id,
                )
            )
        case Preempted(key):
            response.preempted.CopyFrom(pb.Preempted(key=key_to_wire(key)))


def read_response(response: pb.SessionResponse) -> WorkerMessage | None:
    """The body of `response`; None for one this build does not know."""
    match response.WhichOneof("body"):
        case "load_report":
            return load_from_wire(response.load_report)
        case "credit_granted":
            c = response.credit_granted
            return CreditGranted(key_from_wire(c.key), c.lease_s, c.capability, c.num_cached_tokens)
        case "reservation_granted":
            r = response.reservation_granted
            return ReservationGranted(key_from_wire(r.key), r.lease_s, r.num_cached_tokens)
        case "refused":
            f = response.refused
            reason = _REFUSAL_BACK.get(f.reason, RefusalReason.INVALID)
            return Refused(key_from_wire(f.key), reason, f.detail)
        case "first_token":
            t = response.first_token
            return FirstToken(
                key=key_from_wire(t.key),
                index=t.index,
                token_id=t.token_id,
                queue_s=t.queue_s,
                prefill_s=t.prefill_s,
                num_computed_tokens=t.num_computed_tokens,
                num_chunks=t.num_chunks,
                num_overlapped_chunks=t.num_overlapped_chunks,
            )
        case "committed":
            m = response.committed
            return Committed(
                key=key_from_wire(m.key),
                transfer_s=m.transfer_s,
                exposed_transfer_s=m.exposed_transfer_s,
                nbytes=m.nbytes,
                num_chunks=m.num_chunks,
                transport=m.transport,
            )
        case "step":
            return Step(tuple(StepRow(key_from_wire(r.key), r.index, tuple(r.token_ids)) for r in response.step.rows))
        case "finished":
            d = response.finished
            return Finished(
                key=key_from_wire(d.key),
                reason=_FINISH_BACK.get(d.reason, FinishReason.STOP),
                num_output_tokens=d.num_output_tokens,
                queue_s=d.queue_s,
                prefill_s=d.prefill_s,
            )
        case "failed":
            x = response.failed
            failure = _FAILURE_BACK.get(x.reason, FailureReason.INTERNAL)
            return Failed(key_from_wire(x.key), failure, x.detail, x.peer_worker_id)
        case "preempted":
            return Preempted(key_from_wire(response.preempted.key))
        case _:
            return None
