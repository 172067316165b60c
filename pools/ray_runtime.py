"""The real Runtime: Ray, and every Ray call that the controller makes.

Actors outlive whoever created them (detached) and are found again by their names in the cluster's namespace.
They take no CPU of Ray's (a 2-core machine can hold more than two) and are never restarted by Ray (`max_restarts=0`):
the controller sees a death milliseconds after it happened, Ray shows a restarted actor only after seconds.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import ray
import ray.exceptions
from ray.experimental import internal_kv

from pools.runtime import ActorDied, ActorError, ActorHandle, ActorSpec

CONTROLLER_NAME = "controller"
_KV_NAMESPACE = b"tandem"


class RayHandle:
    """ActorHandle over a Ray actor."""

    def __init__(self, actor_id: str, actor: Any) -> None:
        self._actor_id = actor_id
        self._actor = actor

    async def call(self, method: str, *args: Any, timeout_s: float | None) -> Any:
        """See ActorHandle."""
        reference = getattr(self._actor, method).remote(*args)
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except ray.exceptions.RayActorError as exc:
            raise ActorDied(died(exc)) from exc
        except ray.exceptions.RayTaskError as exc:
            raise ActorError(f"{method}: {one_line(exc.cause or exc)}") from exc
        except ray.exceptions.RayError as exc:
            raise ActorError(f"{method}: {one_line(exc)}") from exc

    def kill(self) -> None:
        """See ActorHandle."""
        ray.kill(self._actor, no_restart=True)


class RayRuntime:
    """Runtime over the Ray cluster that this process is connected to."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._key = f"controller/{namespace}".encode()

    def create(self, actor_id: str, spec: ActorSpec) -> ActorHandle:
        """See Runtime."""
        resources = dict(spec.resources)
        options = {
            "name": actor_id,
            "namespace": self._namespace,
            "lifetime": "detached",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
        }
        try:
            actor: Any = ray.remote(spec.actor_class).options(**options).remote(actor_id, **spec.kwargs)
        except (ValueError, ray.exceptions.RayError) as exc:
            raise ActorError(f"Ray refused to create {actor_id}: {one_line(exc)}") from exc
        return RayHandle(actor_id, actor)

    async def find(self) -> dict[str, ActorHandle]:
        """See Runtime."""
        return await asyncio.to_thread(self._find)

    async def save(self, state: bytes) -> None:
        """See Runtime. Kept by Ray's GCS, beside its list of named actors."""
        await asyncio.to_thread(internal_kv._internal_kv_put, self._key, state, True, namespace=_KV_NAMESPACE)

    async def load(self) -> bytes | None:
        """See Runtime."""
        saved: bytes | None = await asyncio.to_thread(internal_kv._internal_kv_get, self._key, namespace=_KV_NAMESPACE)
        return saved

    async def forget(self) -> None:
        """Drop what was saved: the cluster ends."""
        await asyncio.to_thread(internal_kv._internal_kv_del, self._key, namespace=_KV_NAMESPACE)

    def _find(self) -> dict[str, ActorHandle]:
        found: dict[str, ActorHandle] = {}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] == self._namespace and entry["name"] != CONTROLLER_NAME:
                try:
                    found[entry["name"]] = RayHandle(entry["name"], ray.get_actor(entry["name"], self._namespace))
                except ValueError:
                    continue  # it died since it was listed
        return found


def one_line(exc: BaseException) -> str:
    """The message of an error without its traceback."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[-1] if lines else 'no message'}"


def died(exc: ray.exceptions.RayActorError) -> str:
    """How an actor died, in one line instead of Ray's ten."""
    text = str(exc)
    if match := re.search(r"Worker exit type: (\w+)", text):
        if match[1] == "SYSTEM_ERROR":
            return "its process died (killed by a signal, by lack of memory, or crashed)"
        if match[1] == "NODE_OUT_OF_MEMORY":
            return "its process was ended since the machine ran out of memory"
        return f"its process ended ({match[1]})"
    if "killed by `ray.kill`" in text or "ray.kill" in text:
        return "its process was ended by ray.kill"
    return one_line(exc).removeprefix("ActorDiedError: ")
