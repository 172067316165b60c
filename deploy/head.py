"""Ray's head for the embedded default: an own, small, loopback-only Ray for each cluster, guarded by a token.

`ray start --head --block` runs in a session of its own, so that a Ctrl-C in the terminal reaches only Tandem, which
then ends things in order. The temporary folder is short: Unix socket paths are limited to about 100 characters.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from deploy.ports import free_ports, is_loopback
from deploy.record import MARK_VARIABLE, ClusterRecord
from tandem.environment import child_environment
from tandem.errors import ConfigError

# Ray's least: nothing of ours travels through the object store.
OBJECT_STORE_NBYTES = 80 * 1024 * 1024
_LOOPBACK = "127.0.0.1"
# Written by `ray start` as its last act.
_READY_FILE = "ray_current_cluster"


def new_temp_dir() -> str:
    """A folder of mode 0700 for Ray's sockets and logs."""
    return tempfile.mkdtemp(prefix="tdm-", dir="/tmp")


def ray_environment(record: ClusterRecord) -> dict[str, str]:
    """The environment of every process of a cluster.

    Ray takes the machine's outside address even for one node, unless it is told that clusters are not supported here:
    then everything, its scheduler too, listens on loopback only.
    """
    loopback = record.owns_ray or is_loopback(record.ray_address.rpartition(":")[0])
    return child_environment(
        **{MARK_VARIABLE: record.mark},
        RAY_ADDRESS=record.ray_address,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=record.ray_token_file,
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0" if loopback else "1",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        # lifts copies of blocks of some MiB from 0.5 to 0.9 of memcpy
        GLIBC_TUNABLES="glibc.cpu.x86_non_temporal_threshold=0x40000",
    )


def start_head(record: ClusterRecord, num_cpus: int) -> tuple[subprocess.Popen[bytes], ClusterRecord]:
    """Start the head's process; returns it and the record that names it, without waiting for `head_ready`.

    A Popen and not asyncio's process, since that one would be killed with the event loop that started it.
    """
    gcs, client, agent_http, agent_grpc, runtime_env, metrics = free_ports(_LOOPBACK, 6)
    log_path = Path(record.temp_dir) / "head.log"
    arguments = {
        "node-ip-address": _LOOPBACK,
        "port": gcs,
        "ray-client-server-port": client,  # cannot be switched off; loopback, and guarded by the token
        "dashboard-agent-listen-port": agent_http,
        "dashboard-agent-grpc-port": agent_grpc,
        "runtime-env-agent-port": runtime_env,
        "metrics-export-port": metrics,
        "include-dashboard": "false",
        "include-log-monitor": "false",
        "temp-dir": record.temp_dir,
        "object-store-memory": OBJECT_STORE_NBYTES,
        "num-cpus": num_cpus,
        "log-color": "false",
    }
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                *("start", "--head", "--block", "--disable-usage-stats"),
                *(f"--{name}={value}" for name, value in arguments.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=ray_environment(record),
            start_new_session=True,
        )
    return process, record.updated(head_pid=process.pid, ray_address=f"{_LOOPBACK}:{gcs}")


async def head_ready(process: subprocess.Popen[bytes], record: ClusterRecord) -> None:
    """Wait until Ray serves. Raises ConfigError with the last line of its log if it ends instead."""
    ready = Path(record.temp_dir) / _READY_FILE
    while not ready.exists():
        if process.poll() is not None:
            lines = (Path(record.temp_dir) / "head.log").read_text(errors="replace").strip().splitlines()
            raise ConfigError(f"Ray did not start: {lines[-1] if lines else f'exit code {process.returncode}'}")
        await asyncio.sleep(0.05)  # the caller's deadline bounds this
