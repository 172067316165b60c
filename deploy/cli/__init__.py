"""The command line `tandem`: one small module for each group of commands. Imports neither torch nor Ray."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `tandem` with the process's arguments."""
    try:
        from deploy.cli.commands import app  # here, so that a Ctrl-C while Python still imports is no traceback

        app()
    except KeyboardInterrupt:
        sys.exit(130)
