"""Settings that no cluster could serve with are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config import load_config
from tandem.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"timing.lease_s": 0.5}, r"heartbeat_s \(0.5\) must be below lease_s - lease_margin_s \(-1.5\)"),
        ({"timing.lease_margin_s": 10}, "must be below lease_s - lease_margin_s"),
        ({"timing.heartbeat_s": 8, "timing.hang_min_s": 20}, "must be below lease_s - lease_margin_s"),
        ({"timing.heartbeat_s": 3}, r"heartbeat_s \(3\) must be below hang_min_s \(3\)"),
    ],
)
def test_a_heartbeat_that_comes_too_late_for_leases_or_the_failure_detector_is_refused(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"timing: .*{problem}"):
        load_config(None, settings)


def test_a_heartbeat_that_comes_in_time_is_taken() -> None:
    settings = {"timing.lease_s": 0.6, "timing.lease_margin_s": 0.1, "timing.heartbeat_s": 0.1}
    assert load_config(None, settings).timing.lease_s == 0.6


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["timing.default_deadline_s", "router.queue_ttl_s", "pools.start_timeout_s"])
def test_a_wait_without_an_end_cannot_be_configured(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(None, {key: value})
