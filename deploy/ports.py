"""Ports: whether one is free, and finding free ones."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import ExitStack

from tandem.errors import ConfigError


def check_free(host: str, port: int, setting: str) -> None:
    """Raise ConfigError, naming the setting, when nothing can listen there."""
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({exc.strerror}): choose another with {setting}"
            ) from exc


def free_ports(host: str, count: int) -> list[int]:
    """Distinct ports that were free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(_socket(host)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_served(address: str) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    with _socket(host) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


def _socket(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
