"""A model ready to be served by one worker: its numbers, and how to make what computes it over a block pool."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from engine.runner import Runner
from kvtransfer.region import PoolRegion
from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.layout import KVLayout
from tandem.model_files import ModelFiles


@dataclass(frozen=True, slots=True)
class ServedModel:
    """make_runner(kv, num_blocks): over the pool's writable bytes, `[num_blocks, *layout.block_shape]`."""

    layout: KVLayout
    identity: str
    vocab_size: int
    max_model_len: int
    make_runner: Callable[[memoryview, int], Runner]


RunnerFactory = Callable[[ClusterConfig, ModelFiles], ServedModel]


def num_threads_per_worker(config: ClusterConfig) -> int:
    """Configured threads; else the cores shared out among the cluster's workers, at least one each."""
    if config.engine.num_threads:
        return config.engine.num_threads
    num_workers = max(1, config.pools.prefill + config.pools.decode)
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def load_for_cpu(config: ClusterConfig, files: ModelFiles) -> ServedModel:
    """Read the weights and serve them with the CPU backend. Raises ModelError. Blocks for as long as reading takes."""
    from engine.backends.cpu import CpuRunner
    from engine.loader import load_model

    model = load_model(files, config.model.dtype)
    layout = model.kv_layout(config.engine.block_size)

    def make_runner(kv: memoryview, num_blocks: int) -> Runner:
        return CpuRunner(model, kv, num_blocks, layout, num_threads_per_worker(config))

    return ServedModel(layout, model.identity, model.spec.vocab_size, model.max_model_len, make_runner)


def num_pool_blocks(config: ClusterConfig, layout: KVLayout) -> int:
    """Blocks of a worker's pool: as configured, else what fits kv_cache_mib, at least one.

    Raises ConfigError for a pool that this machine's free memory cannot hold: filling it would end other processes.
    """
    num_blocks = config.engine.num_blocks or max(1, config.engine.kv_cache_mib * 1024 * 1024 // layout.block_nbytes)
    needed_mib = num_blocks * layout.block_nbytes >> 20
    available_mib = psutil.virtual_memory().available >> 20
    if needed_mib > available_mib:
        setting = "engine.num_blocks" if config.engine.num_blocks else "engine.kv_cache_mib"
        raise ConfigError(
            f"{setting}: a pool of {num_blocks} blocks needs {needed_mib} MiB, {available_mib} MiB of memory are free"
        )
    return num_blocks


def poison_on_grant(region: PoolRegion, layout: KVLayout, counters: Counter[str]) -> Callable[[list[int]], None]:
    """Test mode: fill granted blocks with 0xFF bytes, which are NaN in every dtype, so that stale reads show."""
    nbytes = layout.block_nbytes
    nan_block = b"\xff" * nbytes

    def fill(block_ids: list[int]) -> None:
        counters["poisoned_blocks"] += len(block_ids)
        for block_id in block_ids:
            region.buffer[block_id * nbytes : (block_id + 1) * nbytes] = nan_block

    return fill
