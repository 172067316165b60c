"""What the controller needs of the thing that runs actors, as two small Protocols, so that tests need no Ray.

`pools/ray_runtime.py` is the real one. An actor of any kind (prefill, decode, router) is a plain class that follows
`ManagedActor`; `deploy/` says which class makes which kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.types import LoadReport, WorkerInfo


class ActorDied(Exception):
    """The actor's process is gone; the message is one line that says how."""


class ActorError(Exception):
    """An actor's method raised; the message is one line."""


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """What an actor says of itself once it serves. `worker` is None for routers."""

    pid: int
    address: str
    worker: WorkerInfo | None = None
    draining: bool = False


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Why an actor could not start, in one line for the user."""

    message: str


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """How one kind of actor is made: `actor_class(actor_id, **kwargs)`, with Ray `resources` for each."""

    actor_class: type
    kwargs: dict[str, Any]
    resources: dict[str, float] = field(default_factory=dict)


class ManagedActor(Protocol):
    """What the controller asks of every actor. All methods but `watch` end by themselves."""

    async def start(self) -> ActorInfo | StartFailed:
        """Start serving. Idempotent: a controller that restarted asks again and gets the same answer."""

    async def watch(self) -> str:
        """Return only when the actor finds itself broken: the reason. Its death ends this call too."""

    async def drain(self, timeout_s: float) -> None:
        """Take no new work; return when what runs has ended, or after `timeout_s`."""

    async def stop(self) -> None:
        """Stop serving. Idempotent."""

    async def load(self) -> LoadReport | None:
        """What runs here now; None where there is nothing to report."""


class ActorHandle(Protocol):
    """A reference to a running actor."""

    async def call(self, method: str, *args: Any, timeout_s: float | None) -> Any:
        """Call a method. Raises ActorDied, ActorError, TimeoutError. `timeout_s` None: for `watch` only."""

    def kill(self) -> None:
        """End the actor's process at once. Idempotent."""


class Runtime(Protocol):
    """Creates, finds and remembers."""

    def create(self, actor_id: str, spec: ActorSpec) -> ActorHandle:
        """Start an actor's process under this name; does not wait for it. Raises ActorError."""

    async def find(self) -> dict[str, ActorHandle]:
        """All live actors of this cluster by name, the controller left out."""

    async def save(self, state: bytes) -> None:
        """Keep the controller's state where a restarted controller finds it."""

    async def load(self) -> bytes | None:
        """What was saved last."""
