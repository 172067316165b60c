import os
import subprocess
import sys

import psutil
import pytest

from deploy import processes, record
from deploy.record import MARK_VARIABLE

POLITE = """
import signal, sys, time
def leave(*_):
    print("asked", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
PARENT = (
    "import subprocess, sys, time, os; "
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env={'PATH': os.environ['PATH']});"
    "print(p.pid, flush=True); time.sleep(60)"
)


@pytest.fixture
def rec(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path / "state"))
    return record.create("a", str(tmp_path))


@pytest.fixture
def start():
    started = []

    def start(code: str, mark: str | None) -> subprocess.Popen[bytes]:
        env = dict(os.environ) if mark is None else {**os.environ, MARK_VARIABLE: mark}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_only_processes_that_carry_the_mark_are_ended(rec, start):
    ours, other, unmarked = start(POLITE, rec.mark), start(POLITE, "another"), start(POLITE, None)
    assert ours.stdout.readline() == b"up\n"
    assert {p.pid for p in processes.members(rec)} == {ours.pid}
    assert processes.end(rec) == []
    assert ours.stdout.read() == b"asked\n"
    assert other.poll() is None
    assert unmarked.poll() is None


def test_descendants_go_too_though_they_have_lost_the_mark(rec, start):
    parent = start(PARENT, rec.mark)
    child = int(parent.stdout.readline())
    assert {p.pid for p in processes.members(rec)} == {parent.pid, child}
    assert processes.end(rec) == []
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_ignores_sigterm_is_killed(rec, start, monkeypatch):
    monkeypatch.setattr(processes, "TERMINATE_PATIENCE_S", 0.2)
    deaf = start(DEAF, rec.mark)
    deaf.stdout.readline()
    assert processes.end(rec) == []
    assert not psutil.pid_exists(deaf.pid)


def test_the_recorded_head_is_asked_first(rec, start, monkeypatch):
    monkeypatch.setattr(processes, "TERMINATE_PATIENCE_S", 1.0)
    head, other = start(POLITE, rec.mark), start(POLITE, rec.mark)
    assert head.stdout.readline() == other.stdout.readline() == b"up\n"
    assert processes.end(rec.updated(head_pid=head.pid)) == []
    assert head.stdout.read() == b"asked\n"
    assert other.stdout.read() == b""


def test_ending_a_cluster_that_has_ended_does_nothing(rec):
    assert processes.end(rec) == []
