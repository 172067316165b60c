"""The cluster's own Ray: loopback only, guarded by its token, and ended whole whatever became of it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy import head, processes, record

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
CONNECT = "import ray; ray.init(address='auto', log_to_driver=False); print(ray.cluster_resources())"


def connect(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CONNECT], env=environment, capture_output=True, text=True, timeout=90)


def test_every_listener_of_the_head_is_on_loopback(ray_head):
    pids = {process.pid for process in processes.members(ray_head)}
    assert len(pids) >= 3
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.net_connections("tcp")
        if connection.pid in pids and connection.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1", "::1"}


def test_a_driver_without_the_token_is_refused(ray_head, tmp_path):
    environment = head.ray_environment(ray_head)
    assert "CPU" in connect(environment).stdout
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    refused = connect({**environment, "RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert refused.returncode != 0
    assert "CPU" not in refused.stdout


def test_secrets_are_in_no_argument_list(ray_head):
    token = Path(ray_head.ray_token_file).read_text()
    for process in processes.members(ray_head):
        arguments = " ".join(process.cmdline())
        assert token not in arguments
        assert ray_head.secret() not in arguments


@pytest.mark.parametrize("victim", ["raylet", "gcs_server", "ray"])
def test_a_head_that_lost_a_part_is_still_ended_whole(state_dir, victim):
    rec = record.create(f"broken-{victim.replace('_', '-')}", head.new_temp_dir())
    process, rec = head.start_head(rec, 1)
    try:
        asyncio.run(asyncio.wait_for(head.head_ready(process, rec), 60))
        everyone = processes.members(rec)
        (lost,) = [member for member in everyone if member.name() == victim]
        os.kill(lost.pid, signal.SIGKILL)
    finally:
        left = processes.end(rec)
        process.wait(10)
        rec.remove()
    assert left == []
    assert not [member for member in everyone if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
