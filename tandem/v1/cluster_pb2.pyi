from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LOST: WorkerState

class WorkerInfo(_message.Message):
    __slots__ = ("role", "endpoint", "pid", "state", "compatibility_hash", "num_blocks", "block_size", "max_model_len", "detail")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    endpoint: _worker_pb2.PeerEndpoint
    pid: int
    state: WorkerState
    compatibility_hash: bytes
    num_blocks: int
    block_size: int
    max_model_len: int
    detail: str
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., endpoint: _Optional[_Union[_worker_pb2.PeerEndpoint, _Mapping]] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., compatibility_hash: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("role", "target", "num_ready", "num_starting", "num_draining", "num_losses", "detail")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_STARTING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    target: int
    num_ready: int
    num_starting: int
    num_draining: int
    num_losses: int
    detail: str
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., target: _Optional[int] = ..., num_ready: _Optional[int] = ..., num_starting: _Optional[int] = ..., num_draining: _Optional[int] = ..., num_losses: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class RouterInfo(_message.Message):
    __slots__ = ("router_id", "pid", "grpc_address", "state")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    pid: int
    grpc_address: str
    state: str
    def __init__(self, router_id: _Optional[str] = ..., pid: _Optional[int] = ..., grpc_address: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("cluster_name", "model", "dtype", "controller_incarnation", "uptime_s", "pools", "workers", "routers", "loads")
    class LoadsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _worker_pb2.LoadReport
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_worker_pb2.LoadReport, _Mapping]] = ...) -> None: ...
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    model: str
    dtype: str
    controller_incarnation: int
    uptime_s: float
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    routers: _containers.RepeatedCompositeFieldContainer[RouterInfo]
    loads: _containers.MessageMap[str, _worker_pb2.LoadReport]
    def __init__(self, cluster_name: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., controller_incarnation: _Optional[int] = ..., uptime_s: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterInfo, _Mapping]]] = ..., loads: _Optional[_Mapping[str, _worker_pb2.LoadReport]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: GetStatusResponse
    def __init__(self, status: _Optional[_Union[GetStatusResponse, _Mapping]] = ...) -> None: ...

class ScalePoolRequest(_message.Message):
    __slots__ = ("role", "target")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    target: int
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., target: _Optional[int] = ...) -> None: ...

class ScalePoolResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: PoolStatus
    def __init__(self, pool: _Optional[_Union[PoolStatus, _Mapping]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetAutoscaleRequest(_message.Message):
    __slots__ = ("role", "min_workers", "max_workers")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    min_workers: int
    max_workers: int
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ...) -> None: ...

class SetAutoscaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchDirectoryRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class WatchDirectoryResponse(_message.Message):
    __slots__ = ("controller_incarnation", "sequence", "workers", "prefill_target", "decode_target")
    CONTROLLER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TARGET_FIELD_NUMBER: _ClassVar[int]
    DECODE_TARGET_FIELD_NUMBER: _ClassVar[int]
    controller_incarnation: int
    sequence: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    prefill_target: int
    decode_target: int
    def __init__(self, controller_incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., prefill_target: _Optional[int] = ..., decode_target: _Optional[int] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
