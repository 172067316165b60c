from tandem.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_ROOM: _ClassVar[RefusalReason]
    REFUSAL_REASON_DRAINING: _ClassVar[RefusalReason]
    REFUSAL_REASON_TOO_LARGE: _ClassVar[RefusalReason]
    REFUSAL_REASON_INVALID: _ClassVar[RefusalReason]

class EngineFinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_FINISH_REASON_UNSPECIFIED: _ClassVar[EngineFinishReason]
    ENGINE_FINISH_REASON_STOP: _ClassVar[EngineFinishReason]
    ENGINE_FINISH_REASON_LENGTH: _ClassVar[EngineFinishReason]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_TRANSFER: _ClassVar[FailureReason]
    FAILURE_REASON_CORRUPT: _ClassVar[FailureReason]
    FAILURE_REASON_LEASE_EXPIRED: _ClassVar[FailureReason]
    FAILURE_REASON_LAYOUT_MISMATCH: _ClassVar[FailureReason]
    FAILURE_REASON_INTERNAL: _ClassVar[FailureReason]
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_NO_ROOM: RefusalReason
REFUSAL_REASON_DRAINING: RefusalReason
REFUSAL_REASON_TOO_LARGE: RefusalReason
REFUSAL_REASON_INVALID: RefusalReason
ENGINE_FINISH_REASON_UNSPECIFIED: EngineFinishReason
ENGINE_FINISH_REASON_STOP: EngineFinishReason
ENGINE_FINISH_REASON_LENGTH: EngineFinishReason
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_TRANSFER: FailureReason
FAILURE_REASON_CORRUPT: FailureReason
FAILURE_REASON_LEASE_EXPIRED: FailureReason
FAILURE_REASON_LAYOUT_MISMATCH: FailureReason
FAILURE_REASON_INTERNAL: FailureReason

class RequestKey(_message.Message):
    __slots__ = ("request_id", "choice", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("router_incarnation", "worker_incarnation", "session", "seq", "resync", "heartbeat", "prompt_segment", "credit", "reserve", "prefill", "release")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    worker_incarnation: int
    session: int
    seq: int
    resync: Resync
    heartbeat: Heartbeat
    prompt_segment: PromptSegment
    credit: Credit
    reserve: Reserve
    prefill: Prefill
    release: Release
    def __init__(self, router_incarnation: _Optional[int] = ..., worker_incarnation: _Optional[int] = ..., session: _Optional[int] = ..., seq: _Optional[int] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., prompt_segment: _Optional[_Union[PromptSegment, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("live",)
    LIVE_FIELD_NUMBER: _ClassVar[int]
    live: _containers.RepeatedCompositeFieldContainer[RequestKey]
    def __init__(self, live: _Optional[_Iterable[_Union[RequestKey, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromptSegment(_message.Message):
    __slots__ = ("key", "offset", "token_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("key", "num_tokens", "solo")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOLO_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    num_tokens: int
    solo: bool
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., num_tokens: _Optional[int] = ..., solo: _Optional[bool] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("key", "token_ids", "num_tokens", "num_prompt_tokens", "sampling", "peer", "capability", "local_prefill")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    num_prompt_tokens: int
    sampling: ResolvedSampling
    peer: PeerEndpoint
    capability: bytes
    local_prefill: bool
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., peer: _Optional[_Union[PeerEndpoint, _Mapping]] = ..., capability: _Optional[bytes] = ..., local_prefill: _Optional[bool] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("key", "token_ids", "num_tokens", "num_prompt_tokens", "sampling")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    num_prompt_tokens: int
    sampling: ResolvedSampling
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ...) -> None: ...

class ResolvedSampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerEndpoint(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "node_id", "shm_name", "tcp_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SHM_NAME_FIELD_NUMBER: _ClassVar[int]
    TCP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    address: str
    node_id: str
    shm_name: str
    tcp_address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., node_id: _Optional[str] = ..., shm_name: _Optional[str] = ..., tcp_address: _Optional[str] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("router_incarnation", "worker_incarnation", "session", "seq", "load_report", "credit_granted", "reservation_granted", "refused", "first_token", "committed", "step", "finished", "failed", "preempted")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LOAD_REPORT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_GRANTED_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    worker_incarnation: int
    session: int
    seq: int
    load_report: LoadReport
    credit_granted: CreditGranted
    reservation_granted: ReservationGranted
    refused: Refused
    first_token: FirstToken
    committed: Committed
    step: Step
    finished: Finished
    failed: Failed
    preempted: Preempted
    def __init__(self, router_incarnation: _Optional[int] = ..., worker_incarnation: _Optional[int] = ..., session: _Optional[int] = ..., seq: _Optional[int] = ..., load_report: _Optional[_Union[LoadReport, _Mapping]] = ..., credit_granted: _Optional[_Union[CreditGranted, _Mapping]] = ..., reservation_granted: _Optional[_Union[ReservationGranted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("num_total_blocks", "num_free_blocks", "num_running", "num_waiting", "queued_prefill_tokens", "progress", "announced_step_s", "draining")
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_total_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    progress: int
    announced_step_s: float
    draining: bool
    def __init__(self, num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., progress: _Optional[int] = ..., announced_step_s: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class CreditGranted(_message.Message):
    __slots__ = ("key", "lease_s", "capability", "num_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    lease_s: float
    capability: bytes
    num_cached_tokens: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., lease_s: _Optional[float] = ..., capability: _Optional[bytes] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class ReservationGranted(_message.Message):
    __slots__ = ("key", "lease_s", "num_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    lease_s: float
    num_cached_tokens: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., lease_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("key", "reason", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    reason: RefusalReason
    detail: str
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("key", "index", "token_id", "queue_s", "prefill_s", "num_computed_tokens", "num_chunks", "num_overlapped_chunks", "logprobs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_OVERLAPPED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    index: int
    token_id: int
    queue_s: float
    prefill_s: float
    num_computed_tokens: int
    num_chunks: int
    num_overlapped_chunks: int
    logprobs: _generation_pb2.TokenLogprobs
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_computed_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ..., num_overlapped_chunks: _Optional[int] = ..., logprobs: _Optional[_Union[_generation_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("key", "transfer_s", "exposed_transfer_s", "nbytes", "num_chunks", "transport")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    transfer_s: float
    exposed_transfer_s: float
    nbytes: int
    num_chunks: int
    transport: str
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., transfer_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., nbytes: _Optional[int] = ..., num_chunks: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[StepRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[StepRow, _Mapping]]] = ...) -> None: ...

class StepRow(_message.Message):
    __slots__ = ("key", "index", "token_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("key", "reason", "num_output_tokens", "queue_s", "prefill_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    reason: EngineFinishReason
    num_output_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., reason: _Optional[_Union[EngineFinishReason, str]] = ..., num_output_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("key", "reason", "detail", "peer_worker_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PEER_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    reason: FailureReason
    detail: str
    peer_worker_id: str
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., reason: _Optional[_Union[FailureReason, str]] = ..., detail: _Optional[str] = ..., peer_worker_id: _Optional[str] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ...) -> None: ...

class AttemptKey(_message.Message):
    __slots__ = ("router_incarnation", "key")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    key: RequestKey
    def __init__(self, router_incarnation: _Optional[int] = ..., key: _Optional[_Union[RequestKey, _Mapping]] = ...) -> None: ...

class ChannelRequest(_message.Message):
    __slots__ = ("decode_incarnation", "prefill_incarnation", "attempt", "subscribe", "ack", "commit_ack", "abort", "hello", "ping")
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    decode_incarnation: int
    prefill_incarnation: int
    attempt: AttemptKey
    subscribe: Subscribe
    ack: Ack
    commit_ack: CommitAck
    abort: Abort
    hello: ChannelHello
    ping: Ping
    def __init__(self, decode_incarnation: _Optional[int] = ..., prefill_incarnation: _Optional[int] = ..., attempt: _Optional[_Union[AttemptKey, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., commit_ack: _Optional[_Union[CommitAck, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., hello: _Optional[_Union[ChannelHello, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class ChannelHello(_message.Message):
    __slots__ = ("compatibility_hash", "decode_worker_id")
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    compatibility_hash: bytes
    decode_worker_id: str
    def __init__(self, compatibility_hash: _Optional[bytes] = ..., decode_worker_id: _Optional[str] = ...) -> None: ...

class ChannelResponse(_message.Message):
    __slots__ = ("decode_incarnation", "prefill_incarnation", "attempt", "offer", "commit", "abort", "pong")
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    decode_incarnation: int
    prefill_incarnation: int
    attempt: AttemptKey
    offer: Offer
    commit: Commit
    abort: Abort
    pong: Pong
    def __init__(self, decode_incarnation: _Optional[int] = ..., prefill_incarnation: _Optional[int] = ..., attempt: _Optional[_Union[AttemptKey, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("capability", "first_token_wanted", "checksum")
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_WANTED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    capability: bytes
    first_token_wanted: int
    checksum: bool
    def __init__(self, capability: _Optional[bytes] = ..., first_token_wanted: _Optional[int] = ..., checksum: _Optional[bool] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("chunk", "block_ids", "generations", "first_token", "num_tokens", "checksum", "last")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    first_token: int
    num_tokens: int
    checksum: int
    last: bool
    def __init__(self, chunk: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., checksum: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    def __init__(self, chunk: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("compatibility_hash", "num_tokens", "first_token_id", "first_token_index", "sampler_state")
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_STATE_FIELD_NUMBER: _ClassVar[int]
    compatibility_hash: bytes
    num_tokens: int
    first_token_id: int
    first_token_index: int
    sampler_state: bytes
    def __init__(self, compatibility_hash: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., first_token_id: _Optional[int] = ..., first_token_index: _Optional[int] = ..., sampler_state: _Optional[bytes] = ...) -> None: ...

class CommitAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: FailureReason
    detail: str
    def __init__(self, reason: _Optional[_Union[FailureReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "pid", "load", "num_leases", "num_attempts", "num_copies_in_flight", "num_prefill_tokens", "num_decode_tokens", "num_forward_calls", "num_decode_calls", "counters", "num_memfds", "num_fds", "num_tasks")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_CALLS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMFDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    pid: int
    load: LoadReport
    num_leases: int
    num_attempts: int
    num_copies_in_flight: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_forward_calls: int
    num_decode_calls: int
    counters: _containers.ScalarMap[str, int]
    num_memfds: int
    num_fds: int
    num_tasks: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., num_leases: _Optional[int] = ..., num_attempts: _Optional[int] = ..., num_copies_in_flight: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_forward_calls: _Optional[int] = ..., num_decode_calls: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., num_memfds: _Optional[int] = ..., num_fds: _Optional[int] = ..., num_tasks: _Optional[int] = ...) -> None: ...
