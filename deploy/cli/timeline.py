"""How a finished answer's timeline is shown: one line after `generate`, a table in the demo. Pure."""

from __future__ import annotations

from rich.table import Table

from tandem.client import Finish, WorkerRef


def timeline_line(finish: Finish) -> str:
    """Tokens, TTFT, ITL, transfer and workers in one line."""
    timeline, usage = finish.timeline, finish.usage
    workers = [_worker(worker) for worker in (timeline.prefill_worker, timeline.decode_worker) if worker]
    parts = [
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens",
        finish.reason.value,
        f"TTFT {_ms(timeline.ttft_s)}",
        f"ITL {_ms(timeline.itl_mean_s)}" if usage.completion_tokens > 1 else "",
        f"KV {_mib(timeline.transfer_nbytes)} by {timeline.transport} in {_ms(timeline.transfer_s)}"
        if timeline.transfer_nbytes
        else "",
        " -> ".join(workers),
        f"{timeline.attempts} attempts" if timeline.attempts > 1 else "",
    ]
    return " · ".join(part for part in parts if part)


def timeline_table(finish: Finish) -> Table:
    """Every phase of the request, each measured inside one process."""
    timeline, usage = finish.timeline, finish.usage
    chunks = f"{timeline.num_chunks} chunk{'' if timeline.num_chunks == 1 else 's'}"
    rows = [
        (timeline.queue_s, "queued in the router"),
        (timeline.reserve_s, "prefill credit and the decode worker's reservation"),
        (timeline.prefill_s, f"prefill of {usage.prompt_tokens} tokens on {_worker(timeline.prefill_worker)}"),
        (timeline.ttft_s, "TTFT: from the request's arrival to its first token"),
    ]
    if timeline.transfer_nbytes:
        crossed = f"KV transfer: {_mib(timeline.transfer_nbytes)} in {chunks} by {timeline.transport}"
        rows += [
            (timeline.transfer_s, f"{crossed}, {_ms(timeline.exposed_transfer_s)} not hidden by prefill"),
            (timeline.first_decode_s, "from token 1 (prefill worker) to token 2 (decode worker)"),
        ]
    rows += [
        (timeline.itl_mean_s, f"ITL: mean of {usage.completion_tokens} tokens on {_worker(timeline.decode_worker)}"),
        (timeline.total_s, "in all"),
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", style="bold")
    table.add_column()
    for duration_s, what in rows:
        table.add_row(_ms(duration_s), what)
    return table


def _worker(worker: WorkerRef | None) -> str:
    return f"{worker.worker_id} (pid {worker.pid})" if worker else "no worker"


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1000:.1f} ms" if duration_s < 1 else f"{duration_s:.2f} s"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
