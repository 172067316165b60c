"""The controller: keeps each pool at its target, and publishes who is there. Knows neither Ray nor gRPC.

Neighbours: `pools/runtime.py` (starts, finds and stops actors), `pools/pool.py` (the pure decisions),
`pools/service.py` (ClusterService over this object). One task owns each member from its start to its end; one loop
starts and drains. After a restart of the controller's process the members are found again by name: nothing they serve
is interrupted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable

from pools.directory import directory_of
from pools.pool import WORKER_KINDS, Member, MemberState, Pool, plan
from pools.runtime import ActorDied, ActorError, ActorHandle, ActorInfo, Runtime, StartFailed
from pools.versioned import Versioned
from tandem.errors import InvalidRequest
from tandem.types import Directory, LoadReport, new_incarnation

log = logging.getLogger(__name__)
MAX_TARGET = 1024
LOAD_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 5.0
ADOPT_TIMEOUT_S = 5.0


class Controller:
    """Supervises the pools until `run` is cancelled or `shut_down` has ended."""

    def __init__(
        self,
        runtime: Runtime,
        pools: dict[str, Pool],
        *,
        start_timeout_s: float,
        drain_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.incarnation = new_incarnation()
        self.pools = pools
        self.directory: Versioned[Directory] = Versioned(directory_of(pools, self.incarnation))
        # Counts the changes that status shows.
        self.revision: Versioned[int] = Versioned(0)
        self.started_at = clock()
        self._runtime = runtime
        self._start_timeout_s = start_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._handles: dict[str, ActorHandle] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._closing = False
        self._saved = b""

    # ---- life

    async def recover(self) -> None:
        """Take over what an earlier process of this controller left: targets, names, live actors.

        Returns when every actor found has answered or ADOPT_TIMEOUT_S has passed, so that the first directory that
        is served already names them.
        """
        if state := await self._runtime.load():
            for kind, saved in json.loads(state).items():
                pool = self.pools[kind]
                pool.target, pool.next_ordinal, pool.num_losses = saved["target"], saved["next"], saved["losses"]
        answered: list[asyncio.Event] = []
        found = sorted((kind, ordinal, h) for (kind, ordinal), h in _parse(await self._runtime.find()).items())
        for kind, ordinal, handle in found:
            if kind in self.pools:
                known = asyncio.Event()
                answered.append(known)
                self._supervise(self.pools[kind], self.pools[kind].adopt(ordinal), handle, known)
        waits = [asyncio.create_task(event.wait()) for event in answered]
        if waits:
            log.info("found %d live actors", len(waits))
            _, pending = await asyncio.wait(waits, timeout=ADOPT_TIMEOUT_S)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def run(self) -> None:
        """Keep the pools at their targets. Ends by cancellation, or raises what a member's task raised."""
        try:
            while not self._closing:
                self._wake.clear()
                wake_at = await self._reconcile()
                timeout_s = None if wake_at is None else max(0.0, wake_at - self._clock())
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                self._raise_failed_tasks()
        finally:
            await self._cancel_tasks()

    async def shut_down(self) -> None:
        """Stop every actor, without waiting for streams. Nothing is restarted afterwards. Idempotent."""
        self._closing = True
        self._wake.set()
        await self._cancel_tasks()
        handles = {**await self._runtime.find(), **self._handles}
        await asyncio.gather(*(self._stop(actor_id, handle) for actor_id, handle in handles.items()))
        for pool in self.pools.values():
            pool.members.clear()
        self._changed()

    # ---- what operators ask

    def scale(self, kind: str, target: int) -> Pool:
        """Set a pool's target. Raises InvalidRequest."""
        if not 0 <= target <= MAX_TARGET:
            raise InvalidRequest("target", f"{target} is outside 0..{MAX_TARGET}")
        pool = self.pools[kind]
        pool.target = target
        pool.failures_in_a_row, pool.not_before = 0, 0.0  # the operator asks: try at once
        self._changed()
        return pool

    def drain(self, worker_id: str) -> None:
        """Drain one worker and replace it if the target asks for that. Raises InvalidRequest for an unknown one."""
        for kind in WORKER_KINDS:
            member = self.pools[kind].members.get(worker_id)
            if member is not None and member.state is not MemberState.LOST:
                member.drain.set()
                self._changed()
                return
        raise InvalidRequest("worker_id", f"{worker_id!r} is not a live worker of this cluster")

    async def loads(self) -> dict[str, LoadReport]:
        """Load reports of the workers that answer within LOAD_TIMEOUT_S."""

        async def ask(actor_id: str, handle: ActorHandle) -> tuple[str, LoadReport | None]:
            try:
                return actor_id, await handle.call("load", timeout_s=LOAD_TIMEOUT_S)
            except (ActorDied, ActorError, TimeoutError):
                return actor_id, None  # its member's task says what became of it

        workers = [
            m for kind in WORKER_KINDS for m in self.pools[kind].in_state(MemberState.READY, MemberState.DRAINING)
        ]
        asked = [(m.actor_id, self._handles[m.actor_id]) for m in workers if m.actor_id in self._handles]
        answers = await asyncio.gather(*(ask(actor_id, handle) for actor_id, handle in asked))
        return {actor_id: load for actor_id, load in answers if load is not None}

    def now(self) -> float:
        """The controller's own clock, as in `started_at`."""
        return self._clock()

    # ---- the loop

    async def _reconcile(self) -> float | None:
        """Start and drain what the plans say; return when to look again though nothing changed."""
        wake_ats: list[float] = []
        new: list[tuple[Pool, Member]] = []
        for pool in self.pools.values():
            decided = plan(pool.target, list(pool.members.values()), pool.not_before, self._clock())
            for actor_id in decided.to_drain:
                pool.members[actor_id].drain.set()
            new += [(pool, pool.new_member()) for _ in range(decided.num_to_start)]
            if decided.wake_at is not None:
                wake_ats.append(decided.wake_at)
        await self._save()  # before a name is used, so that no later controller uses it again
        for pool, member in new:
            self._supervise(pool, member, None, asyncio.Event())
        self._publish()
        return min(wake_ats, default=None)

    def _supervise(self, pool: Pool, member: Member, handle: ActorHandle | None, known: asyncio.Event) -> None:
        task = asyncio.create_task(self._live(pool, member, handle, known), name=f"supervise-{member.actor_id}")
        self._tasks[member.actor_id] = task
        task.add_done_callback(lambda _: self._wake.set())

    async def _live(self, pool: Pool, member: Member, handle: ActorHandle | None, known: asyncio.Event) -> None:
        """One member, from its start to its end, whatever that is."""
        try:
            if handle is None:
                handle = self._runtime.create(member.actor_id, pool.spec)
            self._handles[member.actor_id] = handle
            reason = await self._start(pool, member, handle)
            known.set()
            if reason is None and member.state is MemberState.READY:
                reason = await self._serve(member, handle)
        except (ActorDied, ActorError) as exc:
            reason = str(exc)
        finally:
            known.set()
        if handle is not None:
            await self._stop(member.actor_id, handle, gently=reason is None and member.info is not None)
        if reason is None or member.drain.is_set():
            log.info("%s stopped%s", member.actor_id, f" ({reason})" if reason else "")
            pool.remove(member)
        else:
            log.warning("%s lost: %s", member.actor_id, reason)
            pool.mark_lost(member, reason, self._clock())
        self._changed()

    async def _start(self, pool: Pool, member: Member, handle: ActorHandle) -> str | None:
        """Wait until the member serves; the reason when it does not, None when it does or is not wanted any more."""
        call = asyncio.create_task(handle.call("start", timeout_s=self._start_timeout_s))
        unwanted = asyncio.create_task(member.drain.wait())
        try:
            await asyncio.wait({call, unwanted}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return None
            answer: ActorInfo | StartFailed = call.result()
        except TimeoutError:
            return f"did not start within {self._start_timeout_s:g} s (pools.start_timeout_s)"
        finally:
            await _cancel(call, unwanted)
        if isinstance(answer, StartFailed):
            return answer.message
        pool.mark_ready(member, answer, self._clock())
        if answer.draining:
            member.drain.set()
        log.info("%s serves at %s (pid %d)", member.actor_id, answer.address, answer.pid)
        self._changed()
        return None

    async def _serve(self, member: Member, handle: ActorHandle) -> str | None:
        """Watch a member that serves. The reason of its loss, or None once it was drained. Raises ActorDied.

        The watch is a call that never ends while the actor is well: it breaks milliseconds after its process does.
        """
        watch = asyncio.create_task(handle.call("watch", timeout_s=None))
        drain = asyncio.create_task(self._drain(member, handle))
        try:
            await asyncio.wait({watch, drain}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                reason: str = watch.result()
                return reason
            drain.result()
            return None
        finally:
            await _cancel(watch, drain)

    async def _drain(self, member: Member, handle: ActorHandle) -> None:
        """Once asked for: out of the placement at once, then wait for the streams within drain_timeout_s."""
        await member.drain.wait()
        if member.state is not MemberState.READY:
            return
        member.state = MemberState.DRAINING
        self._changed()
        try:
            await handle.call("drain", self._drain_timeout_s, timeout_s=self._drain_timeout_s + STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s did not drain in time: its streams are re-run elsewhere", member.actor_id)

    async def _stop(self, actor_id: str, handle: ActorHandle, *, gently: bool = True) -> None:
        """End an actor: it may say goodbye to its peers first, then its process ends. Idempotent."""
        try:
            if gently:
                await handle.call("stop", timeout_s=STOP_TIMEOUT_S)
        except (ActorDied, ActorError, TimeoutError) as exc:
            log.info("%s did not stop by itself: %s", actor_id, exc)
        finally:
            handle.kill()
            self._handles.pop(actor_id, None)

    # ---- publishing

    def _changed(self) -> None:
        """Something a reader may see has changed; wakes the loop too."""
        self._publish()
        self._wake.set()

    def _publish(self) -> None:
        self.directory.set(directory_of(self.pools, self.incarnation))
        self.revision.set(self.revision.value + 1)

    async def _save(self) -> None:
        state = {k: {"target": p.target, "next": p.next_ordinal, "losses": p.num_losses} for k, p in self.pools.items()}
        if (encoded := json.dumps(state).encode()) != self._saved:
            await self._runtime.save(encoded)
            self._saved = encoded

    # ---- tasks

    def _raise_failed_tasks(self) -> None:
        for actor_id, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[actor_id]
                task.result()  # a bug of ours ends this process; Ray starts it again and it recovers

    async def _cancel_tasks(self) -> None:
        await _cancel(*self._tasks.values())
        self._tasks.clear()


async def _cancel(*tasks: asyncio.Task[object] | asyncio.Task[None] | asyncio.Task[bool]) -> None:
    """Cancel what still runs and wait for its end; results and errors were or will be looked at elsewhere."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _parse(found: dict[str, ActorHandle]) -> dict[tuple[str, int], ActorHandle]:
    """`decode-3` -> ("decode", 3); other names are not ours."""
    matches = {name: re.fullmatch(r"([a-z]+)-(\d+)", name) for name in found}
    return {(m[1], int(m[2])): found[name] for name, m in matches.items() if m}
