"""`python -m gateway` as a process: its port, its signals, its refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx

from tests.support.running_gateway import CHAT, sse_events
from tests.support.scripted_tokenizer import Script, say, scripted_tokenizer

ROOT = Path(__file__).parents[2]


async def start(*flags: str, port_file: Path | None = None) -> asyncio.subprocess.Process:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RORQUAL_")}
    if port_file is not None:
        environ["RORQUAL_PORT_FILE"] = str(port_file)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *flags, cwd=ROOT, env=environ, stderr=asyncio.subprocess.PIPE
    )


def ended(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is not None


async def port_of(port_file: Path) -> int:
    async with asyncio.timeout(30):
        while not port_file.exists():
            await asyncio.sleep(0.02)
    return int(port_file.read_text())


async def until_it_ends(process: asyncio.subprocess.Process) -> str:
    """What it logs up to the line that says it has taken the signal."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        return (await process.stderr.readuntil(b"ending: ")).decode()


async def test_running_streams_end_before_the_process_does(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with scripted_tokenizer() as tokenizer:
        tokenizer.script = lambda request: Script(say("a", "b").steps, gate=lambda i: go_on if i == 1 else None)
        process = await start("--port", "0", "--tokenizers", tokenizer.address, port_file=tmp_path / "port")
        port = await port_of(tmp_path / "port")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
                parts = response.aiter_text()
                body = await anext(parts)
                process.send_signal(signal.SIGTERM)
                log = await until_it_ends(process)
                assert not ended(process)
                go_on.set()
                body += "".join([part async for part in parts])
            assert sse_events(body)[-1] == "[DONE]"
        async with asyncio.timeout(10):
            _, rest = await process.communicate()
        log += rest.decode()
        assert process.returncode == 0, log
        assert f"listening on http://127.0.0.1:{port}" in log
        assert "Traceback" not in log


async def test_a_second_signal_ends_at_once_with_an_error_event(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with scripted_tokenizer() as tokenizer:
        tokenizer.script = lambda request: Script(say("a", "b").steps, gate=lambda i: never if i == 1 else None)
        process = await start("--port", "0", "--tokenizers", tokenizer.address, port_file=tmp_path / "port")
        port = await port_of(tmp_path / "port")
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            parts = response.aiter_text()
            body = await anext(parts)
            process.send_signal(signal.SIGINT)
            await until_it_ends(process)
            process.send_signal(signal.SIGINT)
            body += "".join([part async for part in parts])
        assert sse_events(body)[-1]["error"]["code"] == "shutting_down"
        async with asyncio.timeout(10):
            await process.communicate()
        assert process.returncode == 0


async def test_a_taken_port_is_named_with_its_cure(tmp_path: Path) -> None:
    first = await start("--port", "0", port_file=tmp_path / "port")
    port = await port_of(tmp_path / "port")
    second = await start("--port", str(port))
    _, log = await second.communicate()
    assert second.returncode == 2
    assert f"127.0.0.1:{port}: the port is taken" in log.decode()
    assert "--port" in log.decode()
    assert "Traceback" not in log.decode()
    first.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        await first.communicate()
    assert first.returncode == 0


async def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    process = await start("--host", "192.0.2.1")
    _, log = await process.communicate()
    assert process.returncode == 2
    assert "--host" in log.decode()
