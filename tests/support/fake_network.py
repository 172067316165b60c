"""Channels between fake processes: FIFO, with random delays; they lose single messages or break as a test says.

A channel's name is its two ends: rp pr (session R-P), rd dr (session R-D), dp pd (control channel of the pair). A
message is named by channel and type, such as `pr CreditGranted`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from router.session import SessionBroken
from tandem.v1 import worker_pb2 as pb


class Network:
    """All channels of one run. `loses` decides over every message; `sent` counts them by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_rngs: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.most_delay_s = 0.003
        self.loses: Callable[[str, Any], bool] = lambda name, message: False
        self.on_arrival: Callable[[str, Any], None] = lambda name, message: None

    def rng_for(self, name: str) -> Random:
        """Randomness of one's own, so that the order in which others draw theirs changes nothing."""
        self._num_rngs[name] += 1
        return Random(f"{self._seed}/{name}/{self._num_rngs[name]}")


def request_id_of(message: Any) -> str | None:
    """Whose message it is; None if it is about no single request."""
    key = message.rows[0].key if type(message).__name__ == "Step" else getattr(message, "key", None)
    return getattr(getattr(key, "key", key), "request_id", None)


class Pipe:
    """One direction of a channel."""

    def __init__(self, network: Network, channel: str, deliver: Callable[[Any], None]) -> None:
        self._network = network
        self._channel = channel
        self._deliver = deliver
        self._rng = network.rng_for(channel)
        self._last_at = 0.0
        self.broken = False
        self.stalled: list[tuple[str, Any, Any]] | None = None

    def send(self, message: Any, envelope: Any) -> None:
        """`message` names it, `envelope` is what arrives."""
        name = f"{self._channel} {type(message).__name__}"
        if self.broken:
            return
        self._network.sent[name] += 1
        if self._network.loses(name, message):
            return
        if self.stalled is not None:
            self.stalled.append((name, message, envelope))
            return
        loop = asyncio.get_running_loop()
        self._last_at = max(self._last_at + 1e-6, loop.time() + self._rng.uniform(0.0001, self._network.most_delay_s))
        loop.call_at(self._last_at, self._arrive, name, message, envelope)

    def _arrive(self, name: str, message: Any, envelope: Any) -> None:
        if not self.broken:
            self._network.on_arrival(name, message)
            self._deliver(envelope)


class FakeSession:
    """Both ends of one session stream. The router's end is a `router.session.SessionStream`."""

    def __init__(
        self, network: Network, letter: str, to_worker: Callable[[FakeSession, pb.SessionRequest], None]
    ) -> None:
        self._arrived: list[pb.SessionResponse] = []
        self._wake = asyncio.Event()
        self._to_worker = Pipe(network, f"r{letter}", lambda request: to_worker(self, request))
        self._to_router = Pipe(network, f"{letter}r", self._arrive)
        self.broken = False
        self.number = -1
        self.router_incarnation = 0
        self.next_seq_in = 0
        self.next_seq_out = 0

    def _arrive(self, response: pb.SessionResponse) -> None:
        self._arrived.append(response)
        self._wake.set()

    # ---- the router's end

    async def read(self) -> pb.SessionResponse | None:
        while not self._arrived:
            if self.broken:
                raise SessionBroken("its session was reset (fake)")
            self._wake.clear()
            await self._wake.wait()
        return self._arrived.pop(0)

    async def write(self, request: pb.SessionRequest) -> None:
        if self.broken:
            raise SessionBroken("its session was reset (fake)")
        body = getattr(request, request.WhichOneof("body") or "")
        self._to_worker.send(body, request)

    # ---- the worker's end

    def send(self, message: Any, response: pb.SessionResponse) -> None:
        self._to_router.send(message, response)

    # ---- either

    def break_off(self) -> None:
        """What is in flight is lost; what has arrived may still be read."""
        self.broken = self._to_worker.broken = self._to_router.broken = True
        self._wake.set()
