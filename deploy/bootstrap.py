"""The one short-lived process that speaks to Ray for `tandem up`: it creates the controller, says where, and ends.

Started by `deploy/launch.py` as `python -m deploy.bootstrap`, so that the command line imports no Ray, and a Ctrl-C in
the middle of it has only a process to end. The order is one JSON line on stdin, the answer one on stdout: {"address":
...} or {"error": ...}.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import ray

from deploy.order import decode_order
from deploy.router_actor import RouterActor
from pools.actors import ControllerActor, WorkerActor
from pools.pool import DECODE, PREFILL, ROUTER
from pools.ray_runtime import CONTROLLER_NAME, died, one_line
from pools.runtime import ActorSpec
from tandem.config import ClusterConfig
from tandem.model_files import ModelFiles
from tandem.model_info import read_model_info
from tandem.types import Role


def specs(config: ClusterConfig, files: ModelFiles, secret: str) -> dict[str, ActorSpec]:
    """What makes a prefill worker, a decode worker and a router of this cluster."""
    common: dict[str, Any] = {"config": config, "files": files, "secret": secret}
    controller_address = f"{config.control.host}:{config.control.port}"
    return {
        PREFILL: ActorSpec(WorkerActor, {"role": Role.PREFILL, **common}, config.pools.prefill_resources),
        DECODE: ActorSpec(WorkerActor, {"role": Role.DECODE, **common}, config.pools.decode_resources),
        ROUTER: ActorSpec(RouterActor, {"controller_address": controller_address, **common}),
    }


def create_controller(config: ClusterConfig, files: ModelFiles, secret: str) -> str:
    """Create the controller in the Ray cluster that this process is connected to; returns its address."""
    info = read_model_info(files, config.model)
    controller: Any = (
        ray.remote(ControllerActor)
        .options(
            name=CONTROLLER_NAME,
            namespace=config.name,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
        )
        .remote(config, secret, specs(config, files, secret), info.name, info.dtype)
    )
    address: str = ray.get(controller.ready.remote(), timeout=config.pools.start_timeout_s)
    return address


def main() -> None:
    """Read the order, obey, answer."""
    config, files, secret = decode_order(sys.stdin.readline())
    try:
        # the address of the Ray to use is in RAY_ADDRESS
        ray.init(address="auto", namespace=config.name, log_to_driver=False, logging_level=logging.ERROR)
        answer = {"address": create_controller(config, files, secret)}
        ray.shutdown()
    except ray.exceptions.RayActorError as exc:
        answer = {"error": f"the controller did not start: {died(exc)}"}
    except Exception as exc:
        answer = {"error": f"the controller did not start: {one_line(exc)}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
