"""The scheduler as a process: where it listens, how it stops, what it says when it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from rorqual.rpc.channel import open_channel
from rorqual.v1 import generation_pb2, generation_pb2_grpc
from tests.support.sim_link import SimExecutorLink

ROOT = Path(__file__).resolve().parents[2]


async def start(*flags: str, port_file: Path | None = None) -> asyncio.subprocess.Process:
    environ = {**os.environ, "RORQUAL_PORT_FILE": str(port_file or "")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.scheduler", *flags, cwd=ROOT, env=environ, stderr=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_it_says_where_it_listens_and_stops_cleanly(tmp_path: Path, signum: signal.Signals) -> None:
    process = await start("--listen", "127.0.0.1:0", port_file=tmp_path / "port")
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while b"listening on 127.0.0.1:" not in (line := await process.stderr.readline()):
                assert line, "it ended"
            port = int(line.rpartition(b":")[2])
            while not (tmp_path / "port").exists():
                await asyncio.sleep(0.01)
        assert int((tmp_path / "port").read_text()) == port
        link = SimExecutorLink(f"127.0.0.1:{port}")
        await link.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            info = await stub.GetServerInfo(generation_pb2.GetServerInfoRequest())
            assert info.num_executors == 1
            process.send_signal(signum)
            async with asyncio.timeout(10):
                assert await process.wait() == 0
        await link.stop()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_taken_port_and_a_bad_flag_are_named() -> None:
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        for flags, text in (
            (("--listen", f"127.0.0.1:{port}"), f"cannot listen on 127.0.0.1:{port}"),
            (("--max-queue-len", "0"), "max-queue-len"),
        ):
            process = await start(*flags)
            async with asyncio.timeout(30):
                _, stderr = await process.communicate()
            assert process.returncode == 2
            assert text in stderr.decode()
            assert "Traceback" not in stderr.decode()
    finally:
        server.close()
        await server.wait_closed()
