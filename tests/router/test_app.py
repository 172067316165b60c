from __future__ import annotations

import asyncio

from router.app import RouterApp
from router.directory import StaticDirectory
from tandem.config import load_config
from tandem.model_info import ModelInfo
from tandem.types import Directory

INFO = ModelInfo("m", "LlamaForCausalLM", 64, 100, (2,), None, "float32")


class BrokenDirectory(StaticDirectory):
    async def run(self) -> None:
        raise KeyError("a role of a newer build")


def app(directory: StaticDirectory) -> RouterApp:
    return RouterApp(load_config(None, {"router.grpc_port": 0}), INFO, None, directory, "secret")


async def test_a_router_whose_directory_died_says_so() -> None:
    router = app(BrokenDirectory(Directory()))
    await router.start()
    try:
        async with asyncio.timeout(20):
            assert "its directory task died: KeyError" in await router.wait_failed()
    finally:
        await router.stop(0.1)


async def test_stopping_is_no_failure() -> None:
    router = app(StaticDirectory(Directory()))
    await router.start()
    failed = asyncio.create_task(router.wait_failed())
    await router.stop(0.1)
    await router.stop(0.1)
    await asyncio.sleep(0)
    assert not failed.done()
    failed.cancel()
    await asyncio.gather(failed, return_exceptions=True)
