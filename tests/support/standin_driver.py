"""Creates a controller over stand-in actors in the Ray of RAY_ADDRESS; the order comes as one JSON line on stdin.

A process of its own, as `deploy.bootstrap` is, so that no test process turns into a Ray driver.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import ray

from pools.actors import ControllerActor
from pools.ray_runtime import CONTROLLER_NAME
from pools.runtime import ActorSpec
from tandem.config import load_config
from tandem.types import Role
from tests.support.standin_actors import StandInActor


def main() -> None:
    order = json.loads(sys.stdin.readline())
    config = load_config(None, order["settings"])
    specs = {
        "prefill": ActorSpec(StandInActor, {"role": Role.PREFILL}),
        "decode": ActorSpec(StandInActor, {"role": Role.DECODE, "start_error": order.get("decode_error", "")}),
        "router": ActorSpec(StandInActor, {"role": None}),
    }
    ray.init(address="auto", namespace=config.name, log_to_driver=False, logging_level=logging.ERROR)
    options: dict[str, Any] = {"name": CONTROLLER_NAME, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
    controller = (
        ray.remote(ControllerActor).options(**options).remote(config, order["secret"], specs, "tiny", "float32")
    )
    print(ray.get(controller.ready.remote(), timeout=60))
    ray.shutdown()


if __name__ == "__main__":
    main()
