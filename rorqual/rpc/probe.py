"""The health probe of a container: `python -m rorqual.rpc.probe [--live] HOST:PORT | http://HOST:PORT/PATH`.

Exits 0 when the server is ready (gRPC health SERVING, HTTP 200); with --live, when it answers at all. Otherwise 1, with
one line that says what it saw.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 2.0


def probe(target: str, *, live: bool) -> str:
    """Empty when the target is well, otherwise what is wrong with it."""
    if target.startswith("http://"):
        try:
            with urllib.request.urlopen(target, timeout=TIMEOUT_S) as response:
                status = response.status
        except urllib.error.HTTPError as error:
            status = error.code
        except OSError as error:
            return f"{target}: no answer ({error})"
        return "" if live or status == 200 else f"{target}: HTTP {status}"
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{target}: no answer ({error.code().name})"
    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
    return "" if live or serving else f"{target}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


def main(argv: list[str]) -> int:
    live = "--live" in argv
    targets = [a for a in argv if a != "--live"]
    if len(targets) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    fault = probe(targets[0], live=live)
    if fault:
        print(fault, file=sys.stderr)
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
