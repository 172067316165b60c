"""`python -m bench.ttft`: what disaggregation costs the first and the second token, on one machine.

Two clusters are up at once, each with a router in this process: one prefill + one decode worker, and one aggregated
worker. Whoever prefills is pinned to the same single core; the decode worker, both routers and the client have the
other. Requests alternate between the arms (A B, B A, ...), so that a machine whose speed drifts cannot favour one.

Printed, per prompt length: TTFT disaggregated / aggregated (pair by pair), the part of the KV transfer that prefill did
not hide, and the gap between tokens 1 and 2 in decode steps of the same answer, idle and beside running streams.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.local_workers import pinned_workers
from bench.seeded_model import write_seeded_llama
from router.app import RouterApp
from router.directory import StaticDirectory
from tandem.config import ClusterConfig, load_config
from tandem.model_files import ModelFiles, resolve_model
from tandem.model_info import read_model_info
from tandem.stream_checker import StreamChecker
from tandem.types import Directory, Role, WorkerInfo
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc as rpc

REQUEST_TIMEOUT_S = 300.0
Client = Any  # a GenerationServiceStub: generated code has no types


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: seconds at the client, except the transfer's, which the decode worker measured."""

    ttft_s: float
    gap_1_2_s: float
    step_s: float
    transfer_s: float
    exposed_transfer_s: float

    @property
    def gap_in_steps(self) -> float:
        """The gap between tokens 1 and 2 in units of this answer's median later gap."""
        return self.gap_1_2_s / self.step_s


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one prompt length."""

    prompt_tokens: int
    pairs: int
    ttft_aggregated_s: float
    ttft_disaggregated_s: float
    ttft_ratio_median: float
    ttft_ratio_min: float
    ttft_ratio_max: float
    transfer_ms: float
    exposed_transfer_ms: float
    gap_steps_idle: float
    gap_steps_aggregated: float
    gap_steps_loaded: float


async def ask(client: Client, prompt: list[int], max_tokens: int) -> Sample:
    """One greedy answer of exactly `max_tokens` tokens, timed at the client. Raises StreamViolation (I1 to I3)."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )
    checker = StreamChecker(max_tokens=max_tokens, num_prompt_tokens=len(prompt))
    started, stamps = time.monotonic(), []
    async for response in client.Generate(request, timeout=REQUEST_TIMEOUT_S):
        now, num_before = time.monotonic(), len(checker.token_ids)
        checker.accept(response)
        stamps += [now] * (len(checker.token_ids) - num_before)
    checker.close()
    assert checker.finish is not None
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    return Sample(
        ttft_s=stamps[0] - started,
        gap_1_2_s=gaps[0],
        step_s=statistics.median(gaps[1:]),
        transfer_s=checker.finish.timeline.transfer_s,
        exposed_transfer_s=checker.finish.timeline.exposed_transfer_s,
    )


async def keep_decoding(client: Client, seed: int, max_tokens: int) -> None:
    """A background stream: short prompts, long answers, until cancelled."""
    rng = np.random.default_rng(seed)
    while True:
        await ask(client, rng.integers(10, 4000, 16).tolist(), max_tokens)


async def start_arm(
    stack: AsyncExitStack, config: ClusterConfig, files: ModelFiles, secret: str, workers: list[WorkerInfo]
) -> Client:
    """A router over `workers`; returns a client of it. Both end with `stack`."""
    prefill = sum(w.role is Role.PREFILL for w in workers)
    directory = Directory(workers=tuple(workers), prefill_target=prefill, decode_target=len(workers) - prefill)
    router = RouterApp(config, read_model_info(files, config.model), None, StaticDirectory(directory), secret)
    address = await router.start()
    stack.push_async_callback(router.stop, 1.0)
    channel = grpc.aio.insecure_channel(address)
    stack.push_async_callback(channel.close)
    return rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]


async def measure(args: argparse.Namespace, config: ClusterConfig, files: ModelFiles) -> list[Row]:
    """Run every prompt length in both arms, interleaved; see the module docstring."""
    secret = secrets.token_hex(16)
    prefill_core, other_core = {args.cores[0]}, {args.cores[1]}
    os.sched_setaffinity(0, other_core)
    specs = [
        (Role.PREFILL, "prefill-0", prefill_core),
        (Role.DECODE, "decode-0", other_core),
        (Role.DECODE, "aggregated-0", prefill_core),
    ]
    rows: list[Row] = []
    rng = np.random.default_rng(args.seed)
    with pinned_workers(specs, config, files, secret) as (prefill, decode, both):
        async with AsyncExitStack() as stack:
            split = await start_arm(stack, config, files, secret, [prefill, decode])
            aggregated = await start_arm(stack, config, files, secret, [both])
            with Progress(disable=args.json) as progress:
                task = progress.add_task("measuring", total=len(args.prompt_tokens) * args.pairs * 3)
                for num_tokens in args.prompt_tokens:

                    def prompt(num_tokens: int = num_tokens) -> list[int]:
                        return [int(i) for i in rng.integers(10, 4000, num_tokens)]

                    for client in (split, aggregated):
                        await ask(client, prompt(), args.max_tokens)  # warm-up: allocator, thread pools, page faults
                    pairs: list[tuple[Sample, Sample]] = []
                    for i in range(args.pairs):
                        ids, got = prompt(), {}
                        for client in (split, aggregated) if i % 2 else (aggregated, split):
                            got[client] = await ask(client, ids, args.max_tokens)
                            progress.advance(task)
                        pairs.append((got[split], got[aggregated]))
                    async with asyncio.TaskGroup() as group:
                        load = [
                            group.create_task(keep_decoding(split, seed, args.load_tokens))
                            for seed in range(args.load_streams)
                        ]
                        await asyncio.sleep(1.0)  # let the streams reach the batch
                        loaded = []
                        for _ in range(args.pairs):
                            loaded.append(await ask(split, prompt(), args.max_tokens))
                            progress.advance(task)
                        for stream in load:
                            stream.cancel()
                    rows.append(summarize(num_tokens, pairs, loaded))
    return rows


def summarize(num_tokens: int, pairs: list[tuple[Sample, Sample]], loaded: list[Sample]) -> Row:
    """Medians, and the ratio pair by pair."""
    median = statistics.median
    split, aggregated = [s for s, _ in pairs], [a for _, a in pairs]
    ratios = [s.ttft_s / a.ttft_s for s, a in pairs]
    return Row(
        prompt_tokens=num_tokens,
        pairs=len(pairs),
        ttft_aggregated_s=median(a.ttft_s for a in aggregated),
        ttft_disaggregated_s=median(s.ttft_s for s in split),
        ttft_ratio_median=median(ratios),
        ttft_ratio_min=min(ratios),
        ttft_ratio_max=max(ratios),
        transfer_ms=1e3 * median(s.transfer_s for s in split),
        exposed_transfer_ms=1e3 * median(s.exposed_transfer_s for s in split),
        gap_steps_idle=median(s.gap_in_steps for s in split),
        gap_steps_aggregated=median(a.gap_in_steps for a in aggregated),
        gap_steps_loaded=median(s.gap_in_steps for s in loaded),
    )


def show(rows: list[Row], console: Console) -> None:
    """Print the table with the targets beside the figures."""
    table = Table(title="Disaggregated against aggregated, one pinned core prefilling in both arms (medians)")
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.prompt_tokens:,} tokens", justify="right")
    table.add_column("target", justify="right")

    def line(name: str, values: list[str], target: str = "") -> None:
        table.add_row(name, *values, target)

    line("TTFT aggregated, s", [f"{r.ttft_aggregated_s:.3f}" for r in rows])
    line("TTFT disaggregated, s", [f"{r.ttft_disaggregated_s:.3f}" for r in rows])
    line(
        "TTFT disaggregated / aggregated (min–max)",
        [f"{r.ttft_ratio_median:.3f} ({r.ttft_ratio_min:.3f}–{r.ttft_ratio_max:.3f})" for r in rows],
        "<= 1.10",
    )
    line("KV transfer, ms", [f"{r.transfer_ms:.1f}" for r in rows])
    line("exposed transfer, ms", [f"{r.exposed_transfer_ms:.1f}" for r in rows])
    line("gap of tokens 1 and 2, decode steps, idle", [f"{r.gap_steps_idle:.2f}" for r in rows], "<= 1.3")
    line("  the same, beside running streams", [f"{r.gap_steps_loaded:.2f}" for r in rows], "<= 2.2")
    line("  the same, aggregated, idle", [f"{r.gap_steps_aggregated:.2f}" for r in rows])
    console.print(table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(prog="python -m bench.ttft", description=__doc__.split("\n\n")[0] if __doc__ else None)
    p.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 2048])
    p.add_argument("--pairs", type=int, default=7, help="requests per arm and prompt length (default 7)")
    p.add_argument("--max-tokens", type=int, default=24, help="answer length, at least 4 (default 24)")
    p.add_argument("--load-streams", type=int, default=4, help="streams beside which the gap is measured (default 4)")
    p.add_argument("--load-tokens", type=int, default=400, help="answer length of those streams (default 400)")
    p.add_argument("--model", default="", help="folder, GGUF or name (default: a 45 M Llama with seeded weights)")
    p.add_argument("--transport", choices=["auto", "shm", "tcp"], default="auto")
    p.add_argument(
        "--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2], metavar=("PREFILL", "REST")
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = p.parse_args(argv)
    if len(args.cores) < 2:
        p.error("two cores are needed: one prefills, one does the rest")
    if args.max_tokens < 4:
        p.error(f"--max-tokens {args.max_tokens}: at least 4, so that later gaps give a step's length")
    return args


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        model = args.model or str(write_seeded_llama(Path(folder) / "model"))
        config = load_config(
            None,
            {
                "model.model": model,
                "engine.num_threads": 1,
                "router.grpc_port": 0,
                "transfer.transport": args.transport,
            },
        )
        rows = asyncio.run(measure(args, config, resolve_model(model)))
    if args.json:
        print(json.dumps([asdict(r) for r in rows], indent=1))
    else:
        show(rows, Console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
