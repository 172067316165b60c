"""`make demo`: the whole path on this machine in one go, with a real model, and nothing left behind.

Fetches SmolLM2-135M-Instruct, starts one prefill and one decode worker on a Ray of its own, asks a question as a chat
over gRPC, streams the answer, shows where the time went, stops everything and looks whether anything stayed. Ctrl-C is
safe at any moment.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import typer

from deploy import processes
from deploy.cli.download import resolve_with_progress
from deploy.cli.interrupt import raise_on_signals, run
from deploy.cli.lifecycle import launch_with_progress
from deploy.cli.output import EXIT_INTERRUPTED, reports_errors, stderr, stdout
from deploy.cli.talk import Answer, stream_answer
from deploy.cli.timeline import timeline_table
from deploy.launch import Launched, take_down
from deploy.ports import is_served
from deploy.record import ClusterRecord
from tandem.cluster_client import ClusterClient
from tandem.config import load_config
from tandem.errors import TandemError
from tandem.model_files import ModelFiles

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"
SETTINGS = {
    "model.model": MODEL,
    "pools.prefill": 1,
    "pools.decode": 1,
    "engine.kv_cache_mib": 128,
    "router.grpc_port": 0,
    "control.port": 0,
}


@dataclass(slots=True)
class Traces:
    """What the cluster was seen to have: none of it may be there afterwards."""

    record: ClusterRecord | None = None
    addresses: list[str] = field(default_factory=list)
    socket_names: list[str] = field(default_factory=list)

    def see(self, record: ClusterRecord) -> None:
        """Called as soon as there is a record, before anything is started."""
        self.record = record

    def left(self) -> list[str]:
        """What is still there."""
        if self.record is None:
            return []
        found = [f"process {process.pid}" for process in processes.members(self.record)]
        found += [f"folder {self.record.temp_dir}"] if Path(self.record.temp_dir).exists() else []
        found += [f"file {self.record.path}"] if self.record.path.exists() else []
        found += [f"listener {address}" for address in self.addresses if is_served(address)]
        open_sockets = Path("/proc/net/unix")
        names = open_sockets.read_text() if open_sockets.exists() else ""
        return found + [f"socket {name}" for name in [*self.socket_names, self.record.temp_dir] if name in names]


@reports_errors
def main() -> None:
    """Run the demo."""
    raise_on_signals()
    stderr.print(f"[bold]Tandem demo[/]  {MODEL} on one prefill and one decode worker\n")
    files = resolve_with_progress(MODEL)
    traces = Traces()
    try:
        run(_demo(files, traces), lambda: stderr.print("[dim]still stopping; please wait[/]"))
    except KeyboardInterrupt:
        stderr.print("\n[yellow]interrupted[/]")
        _look_around(traces)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _look_around(traces)


async def _demo(files: ModelFiles, traces: Traces) -> None:
    settings = load_config(None, {**SETTINGS, "name": f"demo-{os.getpid()}"})
    launched = await launch_with_progress(settings, files, traces.see)
    try:
        await _remember(launched, traces)
        await _ask(launched)
    finally:
        stderr.print("\nstopping ...")
        await take_down(launched.record, launched.head)


async def _remember(launched: Launched, traces: Traces) -> None:
    rec = launched.record
    traces.addresses = [rec.grpc_address, rec.control_address, rec.ray_address]
    async with ClusterClient(rec.control_address, rec.secret()) as client:
        for worker in (await client.status()).workers:
            traces.addresses += [a for a in (worker.endpoint.address, worker.endpoint.tcp_address) if a]
            traces.socket_names += [worker.endpoint.shm_name] if worker.endpoint.shm_name else []


async def _ask(launched: Launched) -> None:
    """One chat question over gRPC, shown token by token."""
    answer = Answer()
    chat = [{"role": "user", "content": QUESTION}]
    stdout.print(f"\n[bold]you[/]    {QUESTION}\n[bold]model[/]  ", end="")
    await stream_answer(launched.record.grpc_address, answer, echo=True, chat=chat, temperature=0.0, max_tokens=64)
    stdout.print("\n")
    if answer.finish is not None:
        stdout.print(timeline_table(answer.finish))


def _look_around(traces: Traces) -> None:
    if left := traces.left():
        raise TandemError(f"something is left: {', '.join(left)}")
    stderr.print("[green]✓[/] nothing is left: no process, no listener, no socket, no shared memory")


if __name__ == "__main__":
    try:
        main()
    except typer.Exit as end:
        sys.exit(end.exit_code)
