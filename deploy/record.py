"""What `up` started, written down so that `down` stops exactly that: one JSON file for each running cluster.

`state_dir()/NAME.json` (0600) is written before anything is started and grows as things start; the cluster secret lies
beside it in `NAME.secret` (0600), never in an argument list. Every process of a cluster carries the record's random
`mark` in its environment, so that none is missed and no recycled pid is ever taken for ours.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from tandem.environment import state_dir
from tandem.errors import ConfigError

MARK_VARIABLE = "TANDEM_CLUSTER_MARK"


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """A cluster that was started from this machine. Empty strings: not yet known."""

    name: str
    mark: str
    temp_dir: str
    # The process that ran `up`; its start time tells it from a later one of the same number.
    starter_pid: int
    starter_start_s: float
    # Of Ray's head; empty when the cluster lives in a Ray that somebody else runs.
    head_pid: int = 0
    ray_address: str = ""
    # The file with the token that opens that Ray.
    ray_token_file: str = ""
    owns_ray: bool = True
    control_address: str = ""
    grpc_address: str = ""
    model: str = ""

    @property
    def path(self) -> Path:
        """The record's own file."""
        return _path(self.name)

    @property
    def secret_path(self) -> Path:
        """Where the cluster secret lies."""
        return _path(self.name).with_suffix(".secret")

    def secret(self) -> str:
        """The cluster secret. Raises ConfigError when its file is gone or not readable."""
        try:
            return self.secret_path.read_text()
        except OSError as exc:
            raise ConfigError(f"cannot read the secret of cluster {self.name!r}: {exc}") from exc

    def starter_lives(self) -> bool:
        """Whether the process that started the cluster still runs: a launch is under way, or `up` in its terminal."""
        try:
            return psutil.Process(self.starter_pid).create_time() == self.starter_start_s
        except psutil.NoSuchProcess:
            return False

    def updated(self, **changes: str | int | bool) -> ClusterRecord:
        """The record with these changes, written to its file."""
        changed: ClusterRecord = replace(self, **changes)  # type: ignore[arg-type]
        temporary = changed.path.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        _write_private(temporary, json.dumps(asdict(changed), indent=2))
        os.replace(temporary, changed.path)
        return changed

    def remove(self) -> None:
        """Forget the cluster: its files and its temporary folder. Idempotent."""
        if self.temp_dir:
            shutil.rmtree(self.temp_dir, ignore_errors=True)
        if self.owns_ray and self.ray_token_file:
            Path(self.ray_token_file).unlink(missing_ok=True)
        self.secret_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class JoinedRay:
    """A Ray that somebody else runs, for a cluster that brings none of its own."""

    address: str
    token_file: str


def create(name: str, temp_dir: str, join: JoinedRay | None = None) -> ClusterRecord:
    """Write a new record, its secret and, for a Ray of its own, its token. Raises ConfigError if the name is taken."""
    state_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
    own_token = _path(name).with_suffix(".ray-token")
    record = ClusterRecord(
        name,
        secrets.token_hex(16),
        temp_dir,
        starter_pid=os.getpid(),
        starter_start_s=psutil.Process().create_time(),
        ray_address=join.address if join else "",
        ray_token_file=join.token_file if join else str(own_token),
        owns_ray=join is None,
    )
    try:
        _write_private(record.path, json.dumps(asdict(record), indent=2))
    except FileExistsError as exc:
        raise running_already(name) from exc
    for path in (record.secret_path, *(() if join else (own_token,))):
        path.unlink(missing_ok=True)
        _write_private(path, secrets.token_hex(32))
    return record


def running_already(name: str) -> ConfigError:
    """What to tell somebody who starts a cluster that runs."""
    return ConfigError(
        f"cluster {name!r} is running already: see `tandem status`, end it with `tandem down`, "
        "or start another with --set name=OTHER --grpc-port 0 --set control.port=0"
    )


def load(name: str) -> ClusterRecord | None:
    """The record of this name; None when there is none. Raises ConfigError for a damaged one."""
    try:
        return ClusterRecord(**json.loads(_path(name).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as exc:
        raise ConfigError(f"{_path(name)}: not a cluster record ({exc})") from exc


def names() -> list[str]:
    """Recorded clusters, running or not."""
    return sorted(path.stem for path in state_dir().glob("*.json"))


def _path(name: str) -> Path:
    return state_dir() / f"{name}.json"


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
