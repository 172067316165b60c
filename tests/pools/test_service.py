import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pools.service import ClusterServicer, serve
from tandem.v1 import cluster_pb2 as pb
from tandem.v1 import cluster_pb2_grpc as rpc
from tandem.wire import secret_metadata
from tests.support.fake_runtime import FakeRuntime, make_controller, until

SECRET = "of the cluster"
METADATA = secret_metadata(SECRET)
EMPTY_CALLS = {
    "GetStatus": pb.GetStatusRequest(),
    "WatchStatus": pb.WatchStatusRequest(),
    "ScalePool": pb.ScalePoolRequest(role=pb.WORKER_ROLE_DECODE, target=9),
    "DrainWorker": pb.DrainWorkerRequest(worker_id="decode-0"),
    "SetAutoscale": pb.SetAutoscaleRequest(),
    "WatchDirectory": pb.WatchDirectoryRequest(),
    "Shutdown": pb.ShutdownRequest(),
}


@asynccontextmanager
async def served(runtime: FakeRuntime):
    controller = make_controller(runtime)
    await controller.recover()
    loop = asyncio.create_task(controller.run())
    ended = asyncio.Event()
    servicer = ClusterServicer(controller, cluster_name="test", model="tiny", dtype="float32", on_shutdown=ended.set)
    server, address = await serve(servicer, SECRET, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address) as channel:
        await until(controller, lambda: len(controller.directory.value.workers) == 2)
        yield controller, channel, ended
    await server.stop(None)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def outcome(call) -> None:
    if hasattr(call, "__await__"):
        await call
    else:
        async for _ in call:
            return


@pytest.mark.parametrize("metadata", [(), secret_metadata("guessed")])
async def test_every_method_refuses_a_caller_without_the_cluster_secret(metadata):
    methods = [m.name for m in pb.DESCRIPTOR.services_by_name["ClusterService"].methods]
    assert set(EMPTY_CALLS) == set(methods)
    async with served(FakeRuntime()) as (controller, channel, ended):
        stub = rpc.ClusterServiceStub(channel)
        for name in methods:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await outcome(getattr(stub, name)(EMPTY_CALLS[name], metadata=metadata, timeout=5))
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
        assert controller.pools["decode"].target == 1
        assert not ended.is_set()


async def test_the_status_shows_pools_workers_routers_and_loads():
    async with served(FakeRuntime()) as (controller, channel, _):
        await until(controller, lambda: len(controller.pools["router"].members) == 1)
        status = await rpc.ClusterServiceStub(channel).GetStatus(pb.GetStatusRequest(), metadata=METADATA, timeout=5)
        assert (status.cluster_name, status.model, status.dtype) == ("test", "tiny", "float32")
        assert [(p.role, p.target, p.num_ready) for p in status.pools] == [(1, 1, 1), (2, 1, 1)]
        assert {w.endpoint.worker_id for w in status.workers} == {"prefill-0", "decode-0"}
        assert [r.router_id for r in status.routers] == ["router-0"]
        assert status.loads["decode-0"].num_total_blocks == 8


async def test_the_directory_comes_whole_with_rising_sequence_numbers():
    runtime = FakeRuntime()
    async with served(runtime) as (controller, channel, _):
        stream = rpc.ClusterServiceStub(channel).WatchDirectory(
            pb.WatchDirectoryRequest(), metadata=METADATA, timeout=10
        )
        first = await stream.read()
        assert {w.endpoint.worker_id for w in first.workers} == {"prefill-0", "decode-0"}
        assert first.controller_incarnation == controller.incarnation
        runtime.kill("decode-0")
        sequence, names = first.sequence, set()
        while names != {"prefill-0", "decode-1"}:
            change = await stream.read()
            assert change.sequence > sequence
            sequence, names = change.sequence, {w.endpoint.worker_id for w in change.workers}
        stream.cancel()


async def test_the_status_stream_tells_of_a_loss_with_its_reason():
    runtime = FakeRuntime()
    async with served(runtime) as (_, channel, _):
        stream = rpc.ClusterServiceStub(channel).WatchStatus(pb.WatchStatusRequest(), metadata=METADATA, timeout=10)
        await stream.read()
        runtime.kill("prefill-0")
        while True:
            status = (await stream.read()).status
            if status.pools[0].num_losses:
                break
        lost = [w for w in status.workers if w.state == pb.WORKER_STATE_LOST]
        assert not lost or "its process died" in lost[0].detail
        stream.cancel()


async def test_scaling_answers_with_the_pool_and_refuses_what_is_wrong():
    async with served(FakeRuntime()) as (controller, channel, _):
        stub = rpc.ClusterServiceStub(channel)
        request = pb.ScalePoolRequest(role=pb.WORKER_ROLE_PREFILL, target=2)
        assert (await stub.ScalePool(request, metadata=METADATA, timeout=5)).pool.target == 2
        for wrong in (pb.ScalePoolRequest(target=1), pb.ScalePoolRequest(role=pb.WORKER_ROLE_DECODE, target=5000)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.ScalePool(wrong, metadata=METADATA, timeout=5)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert controller.pools["decode"].target == 1


async def test_a_decode_pool_of_none_says_that_requests_wait():
    async with served(FakeRuntime()) as (_, channel, _):
        stub = rpc.ClusterServiceStub(channel)
        none = pb.ScalePoolRequest(role=pb.WORKER_ROLE_DECODE, target=0)
        assert "requests wait" in (await stub.ScalePool(none, metadata=METADATA, timeout=5)).pool.detail
        one = pb.ScalePoolRequest(role=pb.WORKER_ROLE_DECODE, target=1)
        assert "requests wait" not in (await stub.ScalePool(one, metadata=METADATA, timeout=5)).pool.detail


async def test_draining_an_unknown_worker_is_refused_by_name():
    async with served(FakeRuntime()) as (_, channel, _):
        stub = rpc.ClusterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="'decode-77' is not a live worker"):
            await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-77"), metadata=METADATA, timeout=5)


async def test_autoscaling_is_refused_as_not_built():
    async with served(FakeRuntime()) as (_, channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rpc.ClusterServiceStub(channel).SetAutoscale(pb.SetAutoscaleRequest(), metadata=METADATA, timeout=5)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_shutdown_stops_every_actor_and_then_the_controller():
    runtime = FakeRuntime()
    async with served(runtime) as (_, channel, ended):
        await rpc.ClusterServiceStub(channel).Shutdown(pb.ShutdownRequest(), metadata=METADATA, timeout=5)
        assert not runtime.live
        assert ended.is_set()


async def test_health_needs_no_secret():
    async with served(FakeRuntime()) as (_, channel, _):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_two_controllers_cannot_share_a_port(monkeypatch):
    monkeypatch.setattr("pools.service.BIND_PATIENCE_S", 0.0)
    async with served(FakeRuntime()) as (controller, channel, _):
        status = await rpc.ClusterServiceStub(channel).GetStatus(pb.GetStatusRequest(), metadata=METADATA, timeout=5)
        assert status.cluster_name == "test"
        servicer = ClusterServicer(controller, cluster_name="b", model="", dtype="", on_shutdown=lambda: None)
        first, address = await serve(servicer, SECRET, "127.0.0.1", 0)
        with pytest.raises(Exception, match="cannot listen on"):
            await serve(servicer, SECRET, "127.0.0.1", int(address.rpartition(":")[2]))
        await first.stop(None)
