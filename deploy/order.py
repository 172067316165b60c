"""The one line by which `deploy/launch.py` tells `deploy/bootstrap.py` what to create: by stdin, never in argv."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.config import ClusterConfig
from tandem.model_files import ModelFiles


def encode_order(config: ClusterConfig, files: ModelFiles, secret: str) -> bytes:
    """One line of JSON."""
    model = {"kind": files.kind, "path": str(files.path), "name": files.name}
    return json.dumps({"config": config.model_dump(mode="json"), "files": model, "secret": secret}).encode() + b"\n"


def decode_order(line: str) -> tuple[ClusterConfig, ModelFiles, str]:
    """What `encode_order` wrote."""
    order = json.loads(line)
    model = order["files"]
    files = ModelFiles(model["kind"], Path(model["path"]), model["name"])
    return ClusterConfig.model_validate(order["config"]), files, order["secret"]
