"""A whole cluster in this process for end-to-end tests: router and workers with real gRPC and real sockets on loopback.

    async with InProcessCluster(config, files, prefill=1, decode=1) as cluster:
        stream = await cluster.generate([1, 2, 3], max_tokens=8)
        assert stream.token_ids == [...]

Every stream goes through a StreamChecker (I1 to I4). Leaving the block checks that every worker is back to the levels
that it had after a warm-up request (I5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from router.app import RouterApp
from router.directory import StaticDirectory
from tandem.config import ClusterConfig, load_config
from tandem.model_files import ModelFiles
from tandem.model_info import read_model_info
from tandem.stream_checker import Baseline, StreamChecker, wait_for_baseline
from tandem.tokenizer import Tokenizer
from tandem.types import Directory, Role, WorkerInfo
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc as rpc
from tandem.v1 import worker_pb2
from tandem.v1 import worker_pb2_grpc as worker_rpc
from tandem.wire import secret_metadata
from worker.host import WorkerHost
from worker.served_model import RunnerFactory

SECRET = "secret of the tests"
REQUEST_TIMEOUT_S = 60.0
BASELINE_TIMEOUT_S = 15.0
MAX_WARM_UP_REQUESTS = 300


def test_config(**settings: object) -> ClusterConfig:
    """Small numbers and NaN-filled grants; `settings` are dotted keys with `__` for the dot."""
    defaults: dict[str, object] = {
        "engine.block_size": 4,
        "engine.num_blocks": 256,
        "engine.chunk_size": 16,
        "engine.num_threads": 1,
        "engine.nan_fill": True,
        "router.grpc_port": 0,
    }
    return load_config(None, {**defaults, **{key.replace("__", "."): value for key, value in settings.items()}})


test_config.__test__ = False  # type: ignore[attr-defined]


class InProcessCluster:
    """Router, prefill and decode workers. `prefill=0` serves aggregated."""

    def __init__(
        self,
        config: ClusterConfig,
        files: ModelFiles,
        *,
        prefill: int = 1,
        decode: int = 1,
        runner_factory: RunnerFactory | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._config = config
        self._files = files
        self._roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        self._runner_factory = runner_factory
        self._tokenizer = tokenizer
        self._stack = AsyncExitStack()
        self._baselines: list[Baseline] = []
        self._lost: set[int] = set()
        self.address = ""
        self.hosts: list[WorkerHost] = []
        self.workers: list[WorkerInfo] = []

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _start(self) -> None:
        for number, role in enumerate(self._roles):
            host = WorkerHost(
                role, f"{role.value}-{number}", self._config, self._files, SECRET, runner_factory=self._runner_factory
            )
            self._stack.push_async_callback(host.stop)
            self.workers.append(await host.start())
            self.hosts.append(host)
        directory = StaticDirectory(
            Directory(
                workers=tuple(self.workers),
                prefill_target=self._roles.count(Role.PREFILL),
                decode_target=self._roles.count(Role.DECODE),
            )
        )
        info = read_model_info(self._files, self._config.model)
        router = RouterApp(self._config, info, self._tokenizer, directory, SECRET)
        self.address = await router.start()
        self._stack.push_async_callback(router.stop, 1.0)
        channel = grpc.aio.insecure_channel(self.address)
        self._stack.push_async_callback(channel.close)
        self._generation = rpc.GenerationServiceStub(channel)
        await self._warm_up()
        for number in range(len(self.hosts)):
            self._baselines.append(await self._idle_levels(number))

    async def _warm_up(self) -> None:
        """Ask until every pair of workers has met: what they dial stays open between requests."""
        prefill = [w.worker_id for w in self.workers if w.role is Role.PREFILL] or [""]
        unmet = {(p, d.worker_id) for p in prefill for d in self.workers if d.role is Role.DECODE}
        for number in range(MAX_WARM_UP_REQUESTS):
            stream = await self.generate([1 + number % 7] * (1 + number % 5), max_tokens=2, ignore_eos=True)
            assert stream.finish is not None
            timeline = stream.finish.timeline
            unmet.discard((timeline.prefill_worker.worker_id, timeline.decode_worker.worker_id))
            if not unmet:
                return
        raise AssertionError(f"after {MAX_WARM_UP_REQUESTS} requests these pairs have not met: {unmet}")

    async def _idle_levels(self, number: int) -> Baseline:
        """Levels of a worker once it is idle; the router's releases may be under way still."""
        async with asyncio.timeout(BASELINE_TIMEOUT_S):
            while True:
                stats = self.hosts[number].stats()
                if stats.num_attempts == 0 and stats.load.num_running == 0 and stats.load.num_waiting == 0:
                    return Baseline.of(stats)
                await asyncio.sleep(0.01)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.assert_baseline()
        finally:
            await self._stack.aclose()

    # ---- requests

    def request(
        self, prompt: Sequence[int] | str, *, stop: Sequence[str] = (), request_id: str = "", **sampling: object
    ) -> pb.GenerateRequest:
        """A greedy request unless `temperature` is given."""
        sampling.setdefault("temperature", 0.0)
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling=pb.SamplingParams(stop=stop, **sampling),  # type: ignore[arg-type]
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return request

    def call(
        self, request: pb.GenerateRequest, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """The bare call, for what `generate` does not do."""
        return self._generation.Generate(request, timeout=timeout_s)

    async def generate(
        self,
        prompt: Sequence[int] | str,
        *,
        references: Mapping[int, Sequence[int]] | None = None,
        cancel_after: int | None = None,
        on_tokens: Callable[[int], None] = lambda _: None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        **request: object,
    ) -> StreamChecker:
        """Run one request to its end, or cancel it after so many tokens; every response is checked.

        on_tokens: told after each response how many tokens have come.

        Raises grpc.aio.AioRpcError (after checking that the stream ended properly) for a request that failed.
        """
        message = self.request(prompt, **request)  # type: ignore[arg-type]
        checker = StreamChecker(
            max_tokens=message.sampling.max_tokens if message.sampling.HasField("max_tokens") else None,
            num_prompt_tokens=len(prompt) if not isinstance(prompt, str) else None,
            references=references,
        )
        call = self.call(message, timeout_s)
        try:
            if cancel_after == 0:
                call.cancel()
            async for response in call:
                checker.accept(response)
                on_tokens(len(checker.token_ids))
                if cancel_after and len(checker.token_ids) >= cancel_after:
                    call.cancel()
        except asyncio.CancelledError:
            if not call.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            checker.fail("cancelled")
        except grpc.aio.AioRpcError as exc:
            checker.fail(f"{exc.code().name}: {exc.details()}")
            checker.close()
            raise
        checker.close()
        return checker

    # ---- workers

    def stats(self, role: Role) -> list[worker_pb2.GetStatsResponse]:
        """Stats of all live workers of a role."""
        hosts = enumerate(zip(self.hosts, self._roles, strict=True))
        return [host.stats() for number, (host, r) in hosts if r is role and number not in self._lost]

    async def stats_over_grpc(self, worker: WorkerInfo, secret: str = SECRET) -> worker_pb2.GetStatsResponse:
        """GetStats as another process would ask."""
        async with grpc.aio.insecure_channel(worker.endpoint.address) as channel:
            stub = worker_rpc.WorkerServiceStub(channel)
            return await stub.GetStats(
                worker_pb2.GetStatsRequest(), metadata=secret_metadata(secret), timeout=REQUEST_TIMEOUT_S
            )

    async def lose(self, number: int) -> None:
        """Stop a worker under whatever runs on it. The directory goes on listing it, as it would for a while."""
        self._lost.add(number)
        await self.hosts[number].stop()

    def number_of(self, worker_id: str) -> int:
        """Index into `hosts` and `workers`."""
        return [w.worker_id for w in self.workers].index(worker_id)

    async def assert_baseline(self) -> None:
        """I5: every worker is back to what it held before the test's requests.

        Over tcp a pair opens its further connections when fetches first run side by side, and keeps them: two sockets
        and one serving task each.
        """
        more = 0
        if self._config.transfer.transport == "tcp":
            pairs = self._roles.count(Role.PREFILL) * self._roles.count(Role.DECODE)
            more = pairs * (self._config.transfer.connections_per_peer - 1)
        for number, (host, baseline) in enumerate(zip(self.hosts, self._baselines, strict=True)):
            if number in self._lost:
                continue

            async def get_stats(host: WorkerHost = host) -> worker_pb2.GetStatsResponse:
                return host.stats()

            await wait_for_baseline(baseline, get_stats, timeout_s=BASELINE_TIMEOUT_S, new_fds=2 * more, new_tasks=more)
