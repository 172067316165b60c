"""A request as the router's inside sees it: checked, tokenized, every default resolved (② and ③)."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import Sampling


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """What each of its choices' lifecycles works on.

    arrived_at and deadline are loop times. `sampling.stop_token_ids` includes EOS unless it is ignored. `arrival` is
    its place in the order of requests.
    """

    request_id: str
    arrival: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...]
    arrived_at: float
    deadline: float
