"""gRPC's settings: both ends of every hop agree, and silence is neither abuse nor forever."""

from __future__ import annotations

import ast
from pathlib import Path

from rorqual.core.config import GatewayConfig
from rorqual.rpc.options import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
CHANNEL, SERVER = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
NOTICED_S = 60.0
"""Within so long a peer that is cut off is known to be dead."""


def test_both_ends_take_messages_of_one_size() -> None:
    for options in (CHANNEL, SERVER):
        assert options["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
        assert options["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES
    # All that the gateway takes fits: a body as large as may be, and a million ids.
    assert GatewayConfig().max_body_bytes < MAX_MESSAGE_BYTES
    assert MAX_MESSAGE_BYTES > 4 * 1_000_000


def test_pings_come_no_more_often_than_the_other_end_allows() -> None:
    assert SERVER["grpc.http2.min_ping_interval_without_data_ms"] <= CHANNEL["grpc.keepalive_time_ms"]
    assert SERVER["grpc.http2.max_ping_strikes"] == 0  # and none is answered with too_many_pings
    for options in (CHANNEL, SERVER):
        assert options["grpc.keepalive_permit_without_calls"] == 1  # an idle channel is kept, too
        assert options["grpc.http2.max_pings_without_data"] == 0  # a prefill of minutes sends no data
        assert (options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]) / 1000 <= NOTICED_S


def test_no_channel_and_no_server_has_settings_of_its_own() -> None:
    """Every process opens them through rorqual.rpc; only the launcher's probe, a call of its own, does not."""
    for folder in ("gateway", "services", "executor", "rorqual"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.parent.name in ("v1", "rpc"):
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "grpc.aio":
                    assert node.attr not in ("server", "insecure_channel", "secure_channel"), f"{file}: {node.lineno}"
