"""How large a worker's pool is, and when it is refused."""

from __future__ import annotations

import pytest

from tandem.config import load_config
from tandem.errors import ConfigError
from tandem.layout import KVLayout
from worker.served_model import num_pool_blocks

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")


def test_the_pool_has_as_many_blocks_as_configured_or_as_fit() -> None:
    assert num_pool_blocks(load_config(None, {"engine.num_blocks": 7}), LAYOUT) == 7
    assert num_pool_blocks(load_config(None, {"engine.kv_cache_mib": 2}), LAYOUT) == (2 << 20) // LAYOUT.block_nbytes


@pytest.mark.parametrize("key", ["engine.num_blocks", "engine.kv_cache_mib"])
def test_a_pool_that_memory_cannot_hold_is_refused_and_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: a pool of \d+ blocks needs \d+ MiB, \d+ MiB of memory are free"):
        num_pool_blocks(load_config(None, {key: 10**12}), LAYOUT)
