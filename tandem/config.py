"""One tree of configuration, passed explicitly. `tandem up --config FILE --set KEY=VALUE` fills it.

Every default number is HANDOFF.md's. Environment variables are read in `tandem/environment.py` only.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandem.errors import ConfigError


class _Section(BaseModel):
    # infinities would make waits without an end
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Section):
    """What is served."""

    model: str = Field("smollm2-135m", description="a folder, a GGUF file, a Hugging Face hub id or smollm2-135m")
    name: str = Field("", description="what clients call it; default: the last part of `model`")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on CPU")
    max_model_len: int = Field(0, ge=0, description="context limit in tokens; 0: the model's own")


class EngineConfig(_Section):
    """The step loop and its block pool, per worker."""

    backend: Literal["cpu"] = "cpu"
    block_size: int = Field(16, ge=1, le=256)
    num_blocks: int = Field(0, ge=0, description="blocks per pool; 0: from kv_cache_mib")
    kv_cache_mib: int = Field(512, ge=1, description="size of a worker's block pool in MiB")
    chunk_size: int = Field(512, ge=1, description="prompt tokens computed in one step")
    max_num_seqs: int = Field(64, ge=1, description="rows in one batch")
    num_threads: int = Field(0, ge=0, description="torch threads per worker; 0: cores / workers, at least 1")
    nan_fill: bool = Field(False, description="test mode: fill granted blocks with NaN")


class TransferConfig(_Section):
    """Moving KV between workers."""

    transport: Literal["auto", "shm", "tcp"] = Field("auto", description="auto: shm on one host, else tcp")
    checksum: Literal["auto", "on", "off"] = Field("auto", description="auto: on for tcp, off for shm")
    offer_timeout_s: float = Field(10.0, gt=0)
    connections_per_peer: int = Field(2, ge=1, le=16)


class TimingConfig(_Section):
    """Leases, heartbeats and patience."""

    lease_s: float = Field(10.0, gt=0)
    heartbeat_s: float = Field(0.5, gt=0)
    lease_margin_s: float = Field(2.0, ge=0)
    hang_min_s: float = Field(3.0, gt=0)
    hang_factor: float = Field(5.0, ge=1)
    commit_overdue_s: float = Field(2.0, gt=0)
    reply_timeout_s: float = Field(5.0, gt=0, description="patience for a worker's answer to credit and reserve")
    retry_budget: int = Field(3, ge=0, description="worker losses and transfer failures a request survives")
    pair_backoff_s: float = Field(2.0, ge=0)
    default_deadline_s: float = Field(600.0, gt=0)
    drain_timeout_s: float = Field(60.0, gt=0, description="then the worker's streams are re-run elsewhere")

    @model_validator(mode="after")
    def _heartbeats_come_in_time(self) -> Self:
        """Heartbeats renew the leases and carry the progress that tells a slow worker from one that hangs."""
        for name, limit_s in (
            ("lease_s - lease_margin_s", self.lease_s - self.lease_margin_s),
            ("hang_min_s", self.hang_min_s),
        ):
            if not self.heartbeat_s < limit_s:
                raise ValueError(f"heartbeat_s ({self.heartbeat_s:g}) must be below {name} ({limit_s:g})")
        return self


class RouterConfig(_Section):
    """The front door."""

    host: str = "127.0.0.1"
    grpc_port: int = Field(50051, ge=0, le=65535, description="0: any free port")
    max_queue: int = Field(256, ge=1, description="requests that wait for a worker")
    queue_ttl_s: float = Field(120.0, gt=0, description="patience while no worker of a needed pool is up")
    max_streams: int = Field(1024, ge=1, description="live requests")
    slow_reader_tokens: int = Field(1024, ge=1, description="undelivered tokens before a stalled client is ended")
    max_tokens_cap: int = Field(1_000_000, ge=1)
    max_stop_strings: int = Field(16, ge=0)
    max_stop_length: int = Field(256, ge=1, description="characters of one stop string")
    max_stop_token_ids: int = Field(64, ge=0)
    tokenizer_threads: int = Field(2, ge=1)


class PoolConfig(_Section):
    """Targets and resources of the two pools."""

    prefill: int = Field(1, ge=0, le=1024, description="prefill workers; 0: aggregated")
    decode: int = Field(1, ge=0, le=1024, description="decode workers")
    prefill_resources: dict[str, float] = Field(default_factory=dict, description="Ray resources of one worker")
    decode_resources: dict[str, float] = Field(default_factory=dict)
    start_timeout_s: float = Field(120.0, gt=0)


class ControlConfig(_Section):
    """The controller's listener."""

    host: str = "127.0.0.1"
    port: int = Field(50050, ge=0, le=65535)


class ClusterConfig(_Section):
    """Everything."""

    name: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="several clusters share a machine")
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    timing: TimingConfig = TimingConfig()
    router: RouterConfig = RouterConfig()
    pools: PoolConfig = PoolConfig()
    control: ControlConfig = ControlConfig()


def load_config(path: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    """Read a YAML file, then apply `overrides` (dotted keys such as `engine.block_size`).

    Raises ConfigError naming the key and what it may be.
    """
    import yaml

    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text())
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror}") from exc
        except (UnicodeDecodeError, yaml.YAMLError) as exc:
            raise ConfigError(f"{path}: {exc}") from exc
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: expected a mapping of sections, found {type(loaded).__name__}")
        data = loaded or {}
    for dotted, value in overrides.items():
        node = data
        *parents, last = dotted.split(".")
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{dotted}: {part} is not a section")
            node = child
        node[last] = value
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as exc:
        raise ConfigError("; ".join(f"{'.'.join(map(str, e['loc']))}: {_problem(e)}" for e in exc.errors())) from exc


def _problem(error: Any) -> str:
    """What is wrong with one setting; for a key that does not exist, the ones that look like it."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    *parents, last = error["loc"]
    section: Any = ClusterConfig
    for part in parents:
        section = section.model_fields[part].annotation
    near = get_close_matches(str(last), section.model_fields, n=1)
    return "there is no such setting" + (f"; did you mean {'.'.join((*parents, near[0]))}?" if near else "")
