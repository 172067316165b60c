"""gRPC options that several listeners and channels share: how a silent peer is noticed, and which ports are shared."""

from __future__ import annotations

Options = tuple[tuple[str, int], ...]

# else a second process could bind the same port, and callers would reach either
EXCLUSIVE_PORT: Options = (("grpc.so_reuseport", 0),)


def keepalive(interval_s: float, patience_s: float) -> Options:
    """Ping every `interval_s`, also while nothing is called; a peer that is silent for `patience_s` is gone.

    ping_timeout_ms is what ends the connection to a process that is stopped: with keepalive_timeout_ms alone it stood
    for over 45 s (grpcio 1.85).
    """
    return (
        ("grpc.keepalive_time_ms", int(interval_s * 1e3)),
        ("grpc.keepalive_timeout_ms", int(patience_s * 1e3)),
        ("grpc.http2.ping_timeout_ms", int(patience_s * 1e3)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def tolerate_pings(interval_s: float) -> Options:
    """A server's consent to peers that ping as often as every `interval_s` while nothing happens."""
    return (
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(interval_s * 1e3)),
    )


def internal_channel(interval_s: float, patience_s: float) -> Options:
    """A channel between two processes of a cluster: a connection of its own, no retries by gRPC, kept alive."""
    return (
        # a shared connection would share its back-off, and outlive a peer that restarted at the same address
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        *keepalive(interval_s, patience_s),
    )
