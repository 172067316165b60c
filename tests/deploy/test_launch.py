import socket
from pathlib import Path

import pytest

from deploy import launch as launching
from deploy import record
from deploy.launch import first_failure, forget_if_dead, progress, settle, whole
from deploy.order import decode_order, encode_order
from tandem.config import load_config
from tandem.errors import ConfigError
from tandem.model_files import ModelFiles
from tandem.v1 import cluster_pb2 as pb

FILES = ModelFiles("hf", Path("/models/tiny"), "tiny")


@pytest.fixture(autouse=True)
def no_model_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(launching, "read_model_info", lambda files, config: None)
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path / "state"))


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def status(decode_ready: int = 1, router: str = "ready", workers=()) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(
        pools=[
            pb.PoolStatus(role=pb.WORKER_ROLE_PREFILL, target=1, num_ready=1),
            pb.PoolStatus(role=pb.WORKER_ROLE_DECODE, target=1, num_ready=decode_ready),
        ],
        workers=workers,
        routers=[pb.RouterInfo(router_id="router-0", state=router)],
    )


def test_open_ports_become_fixed_ones_so_that_a_restart_comes_back_where_it_was():
    settled = settle(load_config(None, {"router.grpc_port": 0, "control.port": 0}), FILES)
    assert settled.router.grpc_port > 0
    assert settled.control.port > 0
    assert settled.router.grpc_port != settled.control.port


@pytest.mark.parametrize(
    ("key", "flag"), [("router.grpc_port", "--grpc-port"), ("control.port", "--set control.port=PORT")]
)
def test_a_port_in_use_is_said_before_anything_starts(taken_port, key, flag):
    other = "control.port" if key == "router.grpc_port" else "router.grpc_port"
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken_port}.*{flag}"):
        settle(load_config(None, {key: taken_port, other: 0}), FILES)


def test_a_port_that_this_cluster_holds_already_is_said_so(taken_port, tmp_path):
    record.create("default", str(tmp_path))
    with pytest.raises(ConfigError, match="'default' is running already"):
        settle(load_config(None, {"router.grpc_port": taken_port, "control.port": 0}), FILES)


def test_one_port_cannot_serve_two_listeners():
    with pytest.raises(ConfigError, match="both 5000"):
        settle(load_config(None, {"router.grpc_port": 5000, "control.port": 5000}), FILES)


def test_a_cluster_without_decode_workers_is_refused():
    with pytest.raises(ConfigError, match="at least one decode worker"):
        settle(load_config(None, {"pools.decode": 0}), FILES)


@pytest.mark.parametrize("key", ["router.host", "control.host"])
@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_listening_beyond_this_machine_is_refused_while_there_is_no_tls(key, host):
    with pytest.raises(ConfigError, match=f"{key}: {host} is not loopback"):
        settle(load_config(None, {key: host}), FILES)


def test_the_order_to_the_bootstrap_process_survives_the_pipe():
    config = load_config(None, {"name": "x", "engine.block_size": 32})
    assert decode_order(encode_order(config, FILES, "secret").decode()) == (config, FILES, "secret")


def test_the_cluster_serves_when_pools_and_router_are_ready():
    assert whole(status())
    assert not whole(status(decode_ready=0))
    assert not whole(status(router="starting"))


def test_progress_counts_what_serves():
    assert progress(status(decode_ready=0)) == "workers load the model: prefill 1/1, decode 0/1, router 1/1"


def test_the_first_failed_start_is_named_with_its_reason():
    lost = pb.WorkerInfo(state=pb.WORKER_STATE_LOST, detail="out of memory")
    lost.endpoint.worker_id = "decode-0"
    assert first_failure(status(workers=[lost])) == "decode-0 did not start: out of memory"
    assert first_failure(status(router="lost: port taken")) == "router-0 did not start: port taken"
    assert first_failure(status()) == ""


async def test_what_a_dead_cluster_left_is_cleared_away(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    old = record.create("a", str(folder))
    old.updated(starter_start_s=old.starter_start_s - 1)
    await forget_if_dead("a")
    assert record.load("a") is None
    assert not folder.exists()


async def test_a_launch_under_way_is_not_cleared_away(tmp_path):
    record.create("a", str(tmp_path))
    await forget_if_dead("a")
    assert record.load("a") is not None
