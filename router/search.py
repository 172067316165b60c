"""④ Waiting in line until a worker may be asked.

Neighbours: admission's Line (order), placement (choice), lifecycle (asks).
"""

from __future__ import annotations

import asyncio
import math
from random import Random

from router.admission import Line
from router.placement import Need, Refusals, choose_decode, choose_prefill, never_fits, pool_is_gone
from router.ports import Cluster, Worker
from tandem.errors import InvalidRequest, Unavailable


class WorkerSearch:
    """One choice's way through the line, over all its attempts.

    queue_ttl_s: how long it waits while no worker of a pool that it needs is up.
    """

    def __init__(self, arrival: int, cluster: Cluster, line: Line, queue_ttl_s: float, rng: Random) -> None:
        self.refusals = Refusals()
        self.waiting_because = ""
        self._arrival = arrival
        self._cluster = cluster
        self._line = line
        self._queue_ttl_s = queue_ttl_s
        self._rng = rng

    async def first_worker(self, need_disaggregated: Need, need_aggregated: Need) -> Worker:
        """Wait until a worker may be asked: a prefill worker, or in aggregated mode a decode worker.

        The mode follows the prefill pool's target, looked at anew after each wait.
        Raises Unavailable when a needed pool is gone for queue_ttl_s, InvalidRequest for what no worker can hold.
        """
        gone_since = math.inf
        while True:
            now = asyncio.get_running_loop().time()
            cluster = self._cluster
            aggregated = cluster.prefill_target == 0
            need = need_aggregated if aggregated else need_disaggregated
            self._check_fits(need, aggregated)
            gone = pool_is_gone(cluster.prefill_workers, cluster.decode_workers, need, aggregated)
            gone_since = math.inf if gone is None else min(gone_since, now)
            if now >= gone_since + self._queue_ttl_s:
                raise Unavailable(f"{gone}, for {self._queue_ttl_s:g} s now")
            self.waiting_because = gone or "no worker had room"
            if gone is None and self._line.may_ask(self._arrival):
                worker = self._choose(need, aggregated)
                if worker is not None:
                    self.waiting_because = ""
                    return worker
            await self._line.wait(self._arrival, min(gone_since + self._queue_ttl_s, cluster.next_reunion_at))

    def partner_of(self, prefill: Worker, need: Need) -> Worker | None:
        """The decode worker to ask after `prefill` gave credit; None if there is none any more."""
        cluster = self._cluster
        return choose_decode(cluster.decode_workers, prefill, need, self.refusals, cluster.avoided_pairs, self._rng)

    def leave(self) -> None:
        """Workers are found, or it is over; idempotent."""
        self._line.leave(self._arrival)

    def _choose(self, need: Need, aggregated: bool) -> Worker | None:
        cluster = self._cluster
        decodes = cluster.decode_workers
        if aggregated:
            return choose_decode(decodes, None, need, self.refusals, (), self._rng)
        return choose_prefill(cluster.prefill_workers, decodes, need, self.refusals, cluster.avoided_pairs, self._rng)

    def _check_fits(self, need: Need, aggregated: bool) -> None:
        problem = never_fits(self._cluster.decode_workers, need.num_decode_tokens, self.refusals)
        if problem is None and not aggregated:
            problem = never_fits(self._cluster.prefill_workers, need.num_prefill_tokens, self.refusals)
        if problem is not None:
            raise InvalidRequest("sampling.max_tokens", f"prompt and max_tokens: {problem}")
