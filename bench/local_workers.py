"""Workers as pinned child processes, without Ray, for measurements that compare two arms on one machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tandem.config import ClusterConfig
from tandem.model_files import ModelFiles
from tandem.types import Role, WorkerInfo

START_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A started worker: its directory entry and how to end it."""

    info: WorkerInfo
    process: BaseProcess

    def stop(self) -> None:
        """End the process; kill it if it does not go within 10 s."""
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


def _serve(
    role: Role, worker_id: str, config: ClusterConfig, files: ModelFiles, secret: str, cores: set[int], pipe: Connection
) -> None:
    os.sched_setaffinity(0, cores)
    from worker.host import WorkerHost  # torch is imported after pinning, so that its pool has the right size

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        host = WorkerHost(role, worker_id, config, files, secret)
        pipe.send(await host.start())
        try:
            await stop.wait()
        finally:
            await host.stop()

    asyncio.run(run())


@contextmanager
def pinned_workers(
    specs: list[tuple[Role, str, set[int]]], config: ClusterConfig, files: ModelFiles, secret: str
) -> Iterator[list[WorkerProcess]]:
    """Start one process per (role, worker_id, cores); yield them in order; end them all.

    Raises RuntimeError when one does not come up in time.
    """
    context = multiprocessing.get_context("spawn")
    started: list[tuple[BaseProcess, Connection]] = []
    workers: list[WorkerProcess] = []
    try:
        for role, worker_id, cores in specs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(role, worker_id, config, files, secret, cores, theirs), name=worker_id
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        for process, ours in started:
            if not ours.poll(START_TIMEOUT_S):
                raise RuntimeError(f"{process.name} did not come up within {START_TIMEOUT_S:.0f} s")
            try:
                workers.append(WorkerProcess(ours.recv(), process))
            except EOFError as exc:
                raise RuntimeError(f"{process.name} ended while starting; its error is above") from exc
        yield workers
    finally:
        for process, ours in started:
            ours.close()
            WorkerProcess.stop(WorkerProcess(None, process))  # type: ignore[arg-type]
