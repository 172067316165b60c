"""All commands, each registered by its module."""

from __future__ import annotations

from deploy.cli import download, lifecycle, observe, talk, version
from deploy.cli.app import app

__all__ = ["app", "download", "lifecycle", "observe", "talk", "version"]
