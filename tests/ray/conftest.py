"""One Ray head for the whole session; clusters on it are told apart by namespace."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from deploy import head, processes, record
from deploy.record import ClusterRecord, JoinedRay


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def ray_head(state_dir: None) -> Iterator[ClusterRecord]:
    """The record of a head that serves."""
    rec = record.create("ray-tests", head.new_temp_dir())
    process = None
    try:
        process, rec = head.start_head(rec, os.cpu_count() or 1)
        asyncio.run(asyncio.wait_for(head.head_ready(process, rec), 60))
        yield rec
    finally:
        left = processes.end(rec)
        if process is not None:
            process.wait(10)
        rec.remove()
        assert left == []


@pytest.fixture(scope="session")
def joined(ray_head: ClusterRecord) -> JoinedRay:
    return JoinedRay(ray_head.ray_address, ray_head.ray_token_file)
