"""Two clients that do nothing wrong, in a process of their own: what they notice is what an attack costs the others.

    python -m benchmarks.hostile.innocents URL

One streams an answer of 400 tokens after another, one asks for four tokens each second. Each line on stdin is answered
by one line of JSON: the worst of each kind in ms since the line before, what still hangs included (and, by itself, as
`hangs_ms`), and what failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.soak.answers import Wrong, read
from benchmarks.soak.client import Broken, Reply, post

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS = "/v1/completions"
STREAM_TOKENS = 400
ANSWER_S = 120.0


class Innocents:
    """The two clients, and the worst that they have met since the last `take`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._failures: list[str] = []
        self._worst: dict[str, float] = {}
        self._num_whole = 0
        self._stream_sent_s = self._short_sent_s = 0.0  # 0: none is under way
        self._reply = Reply()
        self._num_seen = 0  # events of the stream that are counted already
        self._last_event_s = 0.0

    async def run(self) -> None:
        await asyncio.gather(self._stream(), self._short(), self._look())

    def take(self) -> dict[str, Any]:
        """What was met, and a new start."""
        self._count_events()
        now_s, hangs_s = time.perf_counter(), [0.0]
        if self._short_sent_s:
            hangs_s.append(now_s - self._short_sent_s)
            self._worse("short_ms", hangs_s[-1])
        if self._stream_sent_s:
            hangs_s.append(now_s - (self._last_event_s or self._stream_sent_s))
            self._worse("gap_ms" if self._last_event_s else "first_ms", hangs_s[-1])
        taken = {"whole": self._num_whole, "failures": self._failures[:5], "hangs_ms": round(1000 * max(hangs_s), 1)}
        names = ("gap_ms", "first_ms", "short_ms")
        taken |= {name: round(self._worst.get(name, 0.0), 1) for name in names}
        self._failures, self._worst, self._num_whole = [], {}, 0
        return taken

    def _worse(self, name: str, seconds: float) -> None:
        self._worst[name] = max(self._worst.get(name, 0.0), 1000 * seconds)

    async def _look(self) -> None:
        while True:
            self._count_events()
            await asyncio.sleep(0.05)

    def _count_events(self) -> None:
        """Gaps between the stream's events so far."""
        for arrived_s in self._reply.arrivals_s[self._num_seen :]:
            if self._last_event_s:
                self._worse("gap_ms", arrived_s - self._last_event_s)
            else:
                self._worse("first_ms", arrived_s - self._stream_sent_s)
            self._last_event_s = arrived_s
        self._num_seen = len(self._reply.arrivals_s)

    async def _stream(self) -> None:
        number = 0
        while True:
            number += 1
            self._reply, self._num_seen, self._last_event_s = Reply(), 0, 0.0
            self._stream_sent_s = time.perf_counter()
            await self._ask(f"An innocent story, number {number}:", STREAM_TOKENS, self._reply)
            self._count_events()
            self._stream_sent_s = 0.0

    async def _short(self) -> None:
        number = 0
        while True:
            number += 1
            self._short_sent_s = time.perf_counter()
            await self._ask(f"Question {number}:", 4, None)
            self._worse("short_ms", time.perf_counter() - self._short_sent_s)
            waited_s, self._short_sent_s = time.perf_counter() - self._short_sent_s, 0.0
            await asyncio.sleep(max(0.05, 1 - waited_s))

    async def _ask(self, prompt: str, num_tokens: int, reply: Reply | None) -> None:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        if reply is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            answer = read(COMPLETIONS, await post(self._url, COMPLETIONS, body, timeout_s=ANSWER_S, reply=reply))
            if answer.num_output_tokens != num_tokens:
                raise Wrong(f"{answer.num_output_tokens} tokens of {num_tokens}")
            self._num_whole += 1
        except (Broken, Wrong) as error:
            self._failures.append(str(error)[:300])
            await asyncio.sleep(0.25)  # a port that is closed is not asked a thousand times a second


class InnocentProcess:
    """The process, from its owner's side."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hostile.innocents", url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take(self) -> dict[str, Any]:
        """Blocks for as long as the process needs to answer: milliseconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("take\n")
        self._process.stdin.flush()
        taken: dict[str, Any] = json.loads(self._process.stdout.readline())
        return taken

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # reaps it, and closes both pipes


async def _serve(url: str) -> None:
    innocents = Innocents(url)
    running = asyncio.create_task(innocents.run())
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps(innocents.take()), flush=True)
    running.cancel()


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.nice(-5)  # what is measured is the server's slowness, not this process's own
    asyncio.run(_serve(sys.argv[1]))
