"""Finding and ending the processes of one cluster, and no others.

A process belongs to a cluster if the cluster's mark is in the environment it was started with: that survives a change
of parent, and a recycled pid cannot have it. Two of Ray's helpers overwrite their environment with a title: they are
known by the files that they hold open in the cluster's own temporary folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

from deploy.record import MARK_VARIABLE, ClusterRecord

TERMINATE_PATIENCE_S = 5.0
KILL_PATIENCE_S = 5.0


def members(record: ClusterRecord) -> set[psutil.Process]:
    """The cluster's live processes, with their descendants."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if _belongs(process, record):
                found |= {process, *process.children(recursive=True)}
        except psutil.Error:
            continue  # it ended, or belongs to somebody else: not ours in either case
    return {process for process in found if _alive(process)}


def end(record: ClusterRecord) -> list[int]:
    """End every member: Ray's head first (it ends and reaps its children), then the rest. Blocks.

    Returns the pids that are still there after SIGKILL: empty unless the kernel itself hangs.
    """
    ours = members(record)
    _signal({p for p in ours if p.pid == record.head_pid} or ours, "terminate")
    psutil.wait_procs(ours, timeout=TERMINATE_PATIENCE_S)
    deadline = time.monotonic() + KILL_PATIENCE_S
    while time.monotonic() < deadline:
        ours = {process for process in ours | members(record) if _alive(process)}
        if not ours:
            break
        _signal(ours, "kill")  # again and again: one of them may just have started another
        psutil.wait_procs(ours, timeout=0.2)
    return sorted(process.pid for process in ours)


def _belongs(process: psutil.Process, record: ClusterRecord) -> bool:
    if process.environ().get(MARK_VARIABLE) == record.mark:
        return True
    return process.name().startswith("ray::") and any(
        file.path.startswith(f"{record.temp_dir}/") for file in process.open_files()
    )


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: Iterable[psutil.Process], method: str) -> None:
    for process in processes:
        try:
            getattr(process, method)()  # psutil checks the start time first
        except psutil.NoSuchProcess:
            continue
