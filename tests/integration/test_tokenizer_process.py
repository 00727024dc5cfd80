"""`python -m services.tokenizer` as a process: its port, its end, and what it refuses to start with."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from rorqual.rpc.channel import open_channel
from rorqual.v1 import text_pb2, text_pb2_grpc
from tests.support.scripted_scheduler import ScriptedScheduler
from tests.support.text_service import EOS, chat, hear, steps, wait_for_health
from tests.support.vocabularies import tiny

ROOT = Path(__file__).resolve().parents[2]


async def start(*flags: str, port_file: Path | None = None) -> asyncio.subprocess.Process:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RORQUAL_")}
    if port_file is not None:
        env["RORQUAL_PORT_FILE"] = str(port_file)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.tokenizer", *flags, cwd=ROOT, env=env, stderr=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_told_to_stop(tmp_path: Path, signum: int) -> None:
    scheduler = ScriptedScheduler(lambda request: steps([*tiny().encode("abc"), EOS]))
    address = f"127.0.0.1:{await scheduler.start()}"
    port_file = tmp_path / "port"
    process = await start("--listen", "127.0.0.1:0", "--scheduler", address, port_file=port_file)
    try:
        async with asyncio.timeout(60):
            while not port_file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
            port = int(port_file.read_text(encoding="ascii"))
            channel = open_channel(f"127.0.0.1:{port}")
            await wait_for_health(channel, serving=True)
            stub = text_pb2_grpc.TextServiceStub(channel)
            assert (await hear(stub.Chat(chat()))).content[0] == "abc"
            assert (await stub.ListModels(text_pb2.ListModelsRequest())).models[0].name == "tiny"
            await channel.close()
            process.send_signal(signum)
            _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await scheduler.stop()
    assert process.returncode == 0
    assert f"listening on 127.0.0.1:{port}" in stderr.decode()
    assert "Traceback" not in stderr.decode()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nonexistent"], "/nonexistent is not a folder"),
        (["--chat-template", "/nonexistent.jinja"], "/nonexistent.jinja does not exist"),
        (["--listen", "nowhere"], "host:port"),
        (["--modle", "x"], "--model"),
    ],
)
async def test_it_refuses_to_start_in_one_line(flags: list[str], words: str) -> None:
    process = await start(*flags)
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert words in stderr.decode()
    assert "Traceback" not in stderr.decode()
