"""What computes a step. The only code of the engine that runs outside the event loop, in one dedicated thread."""

from __future__ import annotations

from typing import Protocol

from engine.scheduler import Batch


class Runner(Protocol):
    """A model over one block pool."""

    def execute(self, batch: Batch) -> list[int | None]:
        """Compute the batch, write the new KV into the rows' blocks; blocking.

        Returns one entry per scheduled row: the sampled next token where `ScheduledRow.samples`, else None. None for a
        row that samples: its logits are not finite, and there is no honest token.
        Raises whatever the backend raises; the worker is lost then.
        """
        ...
