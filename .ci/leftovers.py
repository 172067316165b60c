"""Fails if a process outlives the CI run that started it: `leftovers.py VALUE_OF_TANDEM_CI_RUN`."""

from __future__ import annotations

import os
import sys
import time

import psutil

PATIENCE_S = 10.0


def left(run: str) -> list[str]:
    """Processes that carry this run's mark, this one and its parents left out."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid not in own
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get("TANDEM_CI_RUN") == run
            ):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except psutil.Error:
            continue
    return found


def main() -> None:
    """Wait a little, then complain."""
    deadline = time.monotonic() + PATIENCE_S
    while (names := left(sys.argv[1])) and time.monotonic() < deadline:
        time.sleep(0.2)
    if names:
        sys.exit("left running:\n" + "\n".join(names))
    print("none")


if __name__ == "__main__":
    main()
