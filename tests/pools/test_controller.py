import asyncio
from contextlib import asynccontextmanager

import pytest

from pools.controller import Controller
from pools.pool import MemberState
from tandem.errors import InvalidRequest
from tests.support.fake_runtime import FakeRuntime, make_controller, until


@asynccontextmanager
async def running(controller: Controller):
    await controller.recover()
    task = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ready(controller: Controller, kind: str) -> list[str]:
    return [m.actor_id for m in controller.pools[kind].in_state(MemberState.READY)]


async def test_the_pools_come_to_their_targets_and_the_directory_names_the_workers():
    async with running(make_controller(FakeRuntime(), prefill=1, decode=2)) as controller:
        await until(controller, lambda: len(controller.directory.value.workers) == 3)
        await until(controller, lambda: ready(controller, "router"))
        directory = controller.directory.value
        assert set(directory.by_id) == {"prefill-0", "decode-0", "decode-1"}
        assert (directory.prefill_target, directory.decode_target) == (1, 2)
        assert directory.controller_incarnation == controller.incarnation


async def test_a_dead_worker_leaves_the_directory_and_is_replaced_under_a_new_name():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as controller:
        await until(controller, lambda: ready(controller, "decode"))
        runtime.kill("decode-0")
        await until(controller, lambda: "decode-0" not in controller.directory.value.by_id)
        await until(controller, lambda: ready(controller, "decode") == ["decode-1"])
        assert controller.pools["decode"].num_losses == 1
        assert "its process died" in controller.pools["decode"].last_failure


async def test_a_dead_router_is_replaced_too():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as controller:
        await until(controller, lambda: ready(controller, "router"))
        runtime.kill("router-0")
        await until(controller, lambda: ready(controller, "router") == ["router-1"])


async def test_a_worker_whose_step_loop_died_is_ended_and_replaced():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as controller:
        await until(controller, lambda: ready(controller, "decode"))
        runtime.live["decode-0"].broken.set_result("its step loop died: ValueError")
        await until(controller, lambda: ready(controller, "decode") == ["decode-1"])
        assert "decode-0" not in runtime.live
        assert "its step loop died" in controller.pools["decode"].last_failure


async def test_a_start_that_fails_again_and_again_backs_off_with_its_reason_in_view():
    runtime = FakeRuntime()
    async with running(
        make_controller(runtime, prefill=0, routers=0, start_error="model /x: no such file")
    ) as controller:
        pool = controller.pools["decode"]
        await until(controller, lambda: pool.failures_in_a_row >= 2)
        assert pool.not_before > controller.now()
        assert "model /x: no such file; next try in" in pool.detail(controller.now())
        before = len(runtime.created)
        await until(controller, lambda: pool.failures_in_a_row >= 3)
        assert len(runtime.created) == before + 1
        assert not runtime.live


async def test_scaling_up_starts_workers_of_that_pool_alone():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as controller:
        await until(controller, lambda: ready(controller, "decode") and ready(controller, "prefill"))
        controller.scale("decode", 3)
        await until(controller, lambda: len(ready(controller, "decode")) == 3)
        assert ready(controller, "prefill") == ["prefill-0"]


async def test_scaling_down_waits_for_the_streams_of_the_worker_that_goes():
    runtime = FakeRuntime()
    async with running(make_controller(runtime, decode=2)) as controller:
        await until(controller, lambda: len(ready(controller, "decode")) == 2)
        leaving = runtime.live["decode-1"]
        controller.scale("decode", 1)
        await until(controller, lambda: controller.directory.value.by_id["decode-1"].draining)
        assert "decode-1" in runtime.live
        leaving.drained.set()
        await until(controller, lambda: "decode-1" not in controller.directory.value.by_id)
        assert list(runtime.live) == ["prefill-0", "decode-0", "router-0"]
        assert leaving.calls[-2:] == ["drain", "stop"]
        assert controller.pools["decode"].num_losses == 0


async def test_a_drain_that_takes_too_long_ends_the_worker_all_the_same():
    runtime = FakeRuntime()
    async with running(make_controller(runtime, decode=2, drain_timeout_s=0.05)) as controller:
        await until(controller, lambda: len(ready(controller, "decode")) == 2)
        controller.scale("decode", 1)
        await until(controller, lambda: "decode-1" not in controller.directory.value.by_id)
        assert "decode-1" not in runtime.live


async def test_scaling_down_gives_up_a_worker_that_is_still_starting():
    runtime = FakeRuntime()
    gate = asyncio.Event()
    async with running(make_controller(runtime, prefill=0, routers=0, decode=1, start_gate=gate)) as controller:
        await until(controller, lambda: "decode-0" in runtime.live)
        controller.scale("decode", 0)
        await until(controller, lambda: not runtime.live)
        assert controller.pools["decode"].num_losses == 0


async def test_draining_one_worker_brings_a_replacement_before_it_has_gone():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as controller:
        await until(controller, lambda: ready(controller, "decode"))
        controller.drain("decode-0")
        await until(controller, lambda: ready(controller, "decode") == ["decode-1"])
        assert controller.directory.value.by_id["decode-0"].draining
        runtime.live["decode-0"].drained.set()
        await until(controller, lambda: "decode-0" not in runtime.live)


async def test_a_worker_that_dies_while_draining_is_no_loss():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as controller:
        await until(controller, lambda: ready(controller, "decode"))
        controller.drain("decode-0")
        await until(controller, lambda: ready(controller, "decode") == ["decode-1"])
        runtime.kill("decode-0")
        await until(controller, lambda: "decode-0" not in controller.directory.value.by_id)
        assert controller.pools["decode"].num_losses == 0


async def test_a_restarted_controller_finds_its_workers_and_targets_again_and_starts_nothing():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as first:
        await until(first, lambda: ready(first, "router"))
        first.scale("decode", 2)
        await until(first, lambda: len(ready(first, "decode")) == 2)
    created = list(runtime.created)
    second = make_controller(runtime)
    async with running(second):
        # before its loop has run at all, so that the first directory a router sees is whole
        assert set(second.directory.value.by_id) == {"prefill-0", "decode-0", "decode-1"}
        assert second.directory.value.decode_target == 2
        assert second.directory.value.controller_incarnation != first.incarnation
        runtime.kill("decode-0")
        await until(second, lambda: ready(second, "decode") == ["decode-1", "decode-2"])
    assert runtime.created == [*created, "decode-2"]


async def test_a_restarted_controller_replaces_what_died_in_its_absence():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as first:
        await until(first, lambda: ready(first, "decode") and ready(first, "prefill") and ready(first, "router"))
    runtime.kill("decode-0")
    async with running(make_controller(runtime)) as second:
        await until(second, lambda: ready(second, "decode") == ["decode-1"])


async def test_shutting_down_ends_every_actor_and_restarts_none():
    runtime = FakeRuntime()
    controller = make_controller(runtime, decode=2)
    await controller.recover()
    loop = asyncio.create_task(controller.run())
    await until(controller, lambda: len(controller.directory.value.workers) == 3)
    await controller.shut_down()
    async with asyncio.timeout(5):
        await loop
    assert not runtime.live
    assert controller.directory.value.workers == ()


async def test_a_worker_about_to_be_started_when_the_cluster_is_shut_down_is_not_started():
    class SlowToRemember(FakeRuntime):
        async def save(self, state: bytes) -> None:
            saving.set()
            await may_save.wait()
            await super().save(state)

    saving, may_save = asyncio.Event(), asyncio.Event()
    runtime = SlowToRemember()
    controller = make_controller(runtime)
    loop = asyncio.create_task(controller.run())
    async with asyncio.timeout(5):
        await saving.wait()
        await controller.shut_down()
        may_save.set()
        await loop
    assert runtime.created == []
    assert controller.directory.value.workers == ()


async def test_loads_come_from_the_workers_that_answer():
    runtime = FakeRuntime()
    async with running(make_controller(runtime)) as controller:
        await until(controller, lambda: len(controller.directory.value.workers) == 2)
        runtime.live["prefill-0"].dead.set()
        assert set(await controller.loads()) == {"decode-0"}


async def test_wrong_targets_and_unknown_workers_are_refused():
    async with running(make_controller(FakeRuntime())) as controller:
        with pytest.raises(InvalidRequest, match="1025 is outside"):
            controller.scale("decode", 1025)
        with pytest.raises(InvalidRequest, match="'decode-9' is not a live worker"):
            controller.drain("decode-9")
