"""The soak itself: it ends on time with a record, and faults that are planted do not get past it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.load import Load, LoadPlan, Outcome
from benchmarks.soak.mix import probes

ROOT = Path(__file__).resolve().parents[2]


def test_ten_seconds_on_simulated_steps_are_clean(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", f"{10 / 60}", "--backend", "sim", "--kills="]
    done = subprocess.run(
        [*command, "--concurrency", "8", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert record == json.loads(out.read_text())
    assert record["failed"] == 0
    assert record["requests"] > record["dropped"] > 0
    assert record["probed"] > 0
    processes = {"gateway", "tokenizer", "scheduler", "executor"}  # and what they started themselves
    assert processes <= set(record["mib"])
    assert processes <= set(record["mib_per_min"])


# --- a server with planted faults ------------------------------------------------------------------------------------


def sound(number: int, words: list[str]) -> tuple[list[str], bool]:
    return words, True


def changes_a_token(number: int, words: list[str]) -> tuple[list[str], bool]:
    """From the 41st request on, one word of each answer is another."""
    return ([*words[:-1], "other "] if number > 40 else words), True


def drops_streams(number: int, words: list[str]) -> tuple[list[str], bool]:
    """From the 41st request on, answers end after their text, as if the server had died."""
    return words, number <= 40


Plant = Callable[[int, list[str]], tuple[list[str], bool]]


class ScriptedChat:
    """Answers every chat with as many words as tokens were asked for, as `plant` has them."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body: dict[str, Any] = json.loads(await reader.readexactly(length))
        self._count += 1
        words, is_whole = self._plant(self._count, ["word "] * body["max_tokens"])
        usage = {"prompt_tokens": 1, "completion_tokens": len(words)}
        streamed = body.get("stream", False)
        form = "delta" if streamed else "message"
        choice = {"index": 0, form: {"content": "".join(words)}, "finish_reason": "length"}
        answer = json.dumps({"choices": [choice], "usage": usage}).encode()
        data = b"data: " + answer + b"\n\ndata: [DONE]\n\n" if streamed else answer
        kind = "text/event-stream" if streamed else "application/json"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        writer.write(b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if is_whole else b""))
        writer.close()


def soak(plant: Plant) -> Outcome:
    async def run() -> Outcome:
        server = await asyncio.start_server(ScriptedChat(plant).serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        plan = LoadPlan(load_s=1.0, concurrency=4, kinds=("chat",), probes=probes(("chat",)), answer_s=10.0)
        load = Load(f"http://127.0.0.1:{port}", plan)
        async with server:
            await load.run()
        return load.outcome

    return asyncio.run(run())


def test_a_sound_server_fails_nothing() -> None:
    outcome = soak(sound)
    assert outcome.failed == 0
    assert outcome.probed > 40  # so many that the faults below are met


@pytest.mark.parametrize(
    ("plant", "what"), [(changes_a_token, "changed tokens"), (drops_streams, "closed before the answer's end")]
)
def test_a_planted_fault_is_noticed(plant: Plant, what: str) -> None:
    outcome = soak(plant)
    assert outcome.failed > 0
    assert all(what in failure["what"] for failure in outcome.first_failures), outcome.first_failures
