"""The router's process as an actor of the cluster: steps ① to ④ and ⑨ run in here. The controller restarts it."""

from __future__ import annotations

import os

from pools.actor_base import ActorBase
from pools.runtime import ActorInfo
from router.app import RouterApp
from router.directory import WatchedDirectory
from tandem.config import ClusterConfig
from tandem.model_files import ModelFiles
from tandem.model_info import read_model_info
from tandem.tokenizer import load_tokenizer

_STOP_GRACE_S = 1.0


class RouterActor(ActorBase):
    """A ManagedActor around `router.app.RouterApp`, which learns the workers from the controller's WatchDirectory."""

    def __init__(
        self, actor_id: str, *, config: ClusterConfig, files: ModelFiles, secret: str, controller_address: str
    ) -> None:
        super().__init__(actor_id)
        self._config = config
        self._files = files
        self._secret = secret
        self._controller_address = controller_address
        self._app: RouterApp | None = None

    async def _begin(self) -> ActorInfo:
        info = read_model_info(self._files, self._config.model)
        directory = WatchedDirectory(self._controller_address, self._secret, self._actor_id)
        self._app = RouterApp(self._config, info, load_tokenizer(self._files), directory, self._secret)
        return ActorInfo(os.getpid(), await self._app.start())

    async def watch(self) -> str:
        """See ManagedActor. A router without its directory or its sessions must not look alive."""
        assert self._app is not None, "the controller watches what has started"
        return await self._app.wait_failed()

    async def _drain(self, timeout_s: float) -> None:
        assert self._app is not None
        await self._app.stop(timeout_s)

    async def _end(self) -> None:
        if self._app is not None:
            await self._app.stop(_STOP_GRACE_S)
