"""Workers as pinned child processes, without Ray, for measurements that compare two arms on one machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tandem.config import ClusterConfig
from tandem.model_files import ModelFiles
from tandem.types import Role, WorkerInfo

START_TIMEOUT_S = 180.0


def _end(process: BaseProcess) -> None:
    """End the process; kill it if it does not go within 10 s."""
    process.terminate()
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join(10)


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
) -> Iterator[list[WorkerInfo]]:
    """Start one process per (role, worker_id, cores); yield their directory entries in order; end them all.

    Raises RuntimeError when one does not come up in time.
    """
    context = multiprocessing.get_context("spawn")
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for role, worker_id, cores in specs:
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_serve, args=(role, worker_id, config, files, secret, cores, theirs), name=worker_id
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        yield [_directory_entry(process, pipe) for process, pipe in started]
    finally:
        for process, pipe in started:
            pipe.close()
            _end(process)


def _directory_entry(process: BaseProcess, pipe: Connection) -> WorkerInfo:
    if not pipe.poll(START_TIMEOUT_S):
        raise RuntimeError(f"{process.name} did not come up within {START_TIMEOUT_S:.0f} s")
    try:
        entry: WorkerInfo = pipe.recv()
    except EOFError as exc:
        raise RuntimeError(f"{process.name} ended while starting; its error is above") from exc
    return entry
