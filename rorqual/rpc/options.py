"""gRPC settings, the same at both ends of every hop."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A million-token prompt is 4 MB of ids, and up to some 10 MB of text."""

KEEPALIVE_TIME_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_RECONNECT_BACKOFF_MS = 1_000

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # A silent prefill of minutes sends no data: pings must go on, and must not be taken for abuse.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
    # A channel of its own for each: two to one address never share a connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
    # Loopback and cluster addresses are never reached through a web proxy.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Exclusive ports: otherwise a second server on a taken port binds without a word.
    ("grpc.so_reuseport", 0),
)
