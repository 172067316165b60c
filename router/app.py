"""The router as a whole: wiring, start and stop (① to ④ and ⑨). Neighbours: deploy's RouterActor, tests, bench."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.admission import Admission, Line
from router.dial import grpc_dial
from router.directory import DirectorySource
from router.fleet import Fleet
from router.malformed import MalformedInterceptor
from router.service import GenerationServicer, ServiceParts
from router.validate import Limits
from tandem.config import ClusterConfig
from tandem.errors import ConfigError, Unavailable
from tandem.grpc_options import EXCLUSIVE_PORT, keepalive, tolerate_pings
from tandem.model_info import ModelInfo
from tandem.tokenizer import Tokenizer
from tandem.types import new_incarnation
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc as rpc

log = logging.getLogger(__name__)

MAX_REQUEST_NBYTES = 8 * 1024 * 1024
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_SERVER_OPTIONS = (
    *EXCLUSIVE_PORT,
    ("grpc.max_receive_message_length", MAX_REQUEST_NBYTES),
    *keepalive(20, 10),
    *tolerate_pings(5),
)
_FLUSH_PATIENCE_S = 1.0
_END_PATIENCE_S = 1.0


class RouterApp:
    """Serves GenerationService on config.router's address over the workers of `directory`."""

    def __init__(
        self,
        config: ClusterConfig,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        directory: DirectorySource,
        secret: str,
    ) -> None:
        self._config = config
        self._directory = directory
        self.counters: Counter[str] = Counter()
        self._line = Line()
        self._admission = Admission(self._line, config.router.max_queue, config.router.max_streams)
        self._fleet = Fleet(
            directory, config.timing, new_incarnation(), grpc_dial(secret), self.counters, self._line.wake
        )
        self._tokenizing = ThreadPoolExecutor(config.router.tokenizer_threads, thread_name_prefix="tokenizer")
        self._servicer = GenerationServicer(
            ServiceParts(
                config=config,
                limits=Limits(
                    model=info,
                    router=config.router,
                    has_tokenizer=tokenizer is not None,
                    has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
                ),
                tokenizer=tokenizer,
                cluster=self._fleet,
                line=self._line,
                admission=self._admission,
                tokenizing=self._tokenizing,
                rng=Random(),
            )
        )
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._died = asyncio.Event()
        self._cause_of_death = ""

    async def start(self) -> str:
        """Start serving; returns host:port. Raises ConfigError when the address cannot be bound."""
        server = grpc.aio.server(interceptors=[MalformedInterceptor(SERVICE_NAME)], options=_SERVER_OPTIONS)
        rpc.add_GenerationServiceServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host, port = self._config.router.host, self._config.router.grpc_port
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as exc:
            raise ConfigError(f"router.grpc_port: cannot listen on {host}:{port}: {exc}") from exc
        await server.start()
        self._server = server
        self._tasks = [
            asyncio.create_task(self._directory.run(), name="directory"),
            asyncio.create_task(self._fleet.run(), name="fleet"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{bound}"

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s`, end the rest with UNAVAILABLE. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._servicer.start_draining()
        try:
            async with asyncio.timeout(grace_s):
                await self._admission.wait_empty()
        except TimeoutError:
            log.warning("%d requests are ended, they did not finish within %g s", self._admission.num_live, grace_s)
            self._servicer.end_all(Unavailable("this router is stopping"))
        finally:
            await server.stop(_END_PATIENCE_S)
            await self._fleet.flush(_FLUSH_PATIENCE_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def wait_failed(self) -> str:
        """Return, with the reason, once a task that everything here depends on has died. A stop is no failure."""
        await self._died.wait()
        return self._cause_of_death

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (exc := task.exception()) is None:
            return
        log.error("the router's %s has died", task.get_name(), exc_info=exc)
        self._cause_of_death = f"its {task.get_name()} task died: {exc!r}"
        self._died.set()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)
