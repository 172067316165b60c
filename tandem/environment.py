"""The one place where environment variables are read."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where models and downloads are kept: $TANDEM_CACHE, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem."""
    if explicit := os.environ.get("TANDEM_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def state_dir() -> Path:
    """Where running clusters are recorded: $TANDEM_STATE, else $XDG_STATE_HOME/tandem, else ~/.local/state/tandem."""
    if explicit := os.environ.get("TANDEM_STATE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tandem"


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment for a child process: this one's, with changes."""
    return {**os.environ, **changes}
