"""A step loop on the link, from its start to a clean stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from rorqual.core.config import ExecutorConfig
from rorqual.core.errors import InternalError
from rorqual.telemetry import Telemetry
from rorqual.v1 import executor_pb2

from .link import Loop, SchedulerLink
from .observe import StepObserver
from .reports import EndedSequence, StepStats

_log = logging.getLogger("executor")

SHIPPED_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny"
SWITCH_INTERVAL_S = 50e-6
"""How long another thread may keep the interpreter from the step loop. (At the default of 5 ms a busy thread costs
the loop 5.2 ms each time it wants the interpreter back; at 50 us 0.2 ms.)"""


class ServedLoop(Loop, Protocol):
    """A loop as it is served: started, watched, stopped."""

    stats: deque[StepStats]
    ended: deque[EndedSequence]
    on_crash: Callable[[BaseException], None]

    def stop(self) -> None: ...


def model_folder(config: ExecutorConfig) -> Path:
    return Path(config.model) if config.model else SHIPPED_MODEL


def served_name(config: ExecutorConfig) -> str:
    """What clients ask for."""
    return config.served_model_name or model_folder(config).resolve().name


async def serve_loop(
    config: ExecutorConfig,
    loop: ServedLoop,
    start: Callable[[], Awaitable[executor_pb2.Hello]],
    telemetry: Telemetry,
    model_name: str,
    stop: asyncio.Event,
    ready_file: str = "",
) -> None:
    """`start` the loop, then connect and step until `stop` is set.

    Raises LinkRefusedError, what `start` raises, and InternalError if the step loop ended.
    """
    observer = StepObserver(telemetry, model_name)
    event_loop = asyncio.get_running_loop()
    crashed: asyncio.Future[BaseException] = event_loop.create_future()
    loop.on_crash = lambda error: _set_from_thread(event_loop, crashed, error)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tasks: list[asyncio.Future[Any]] = []
    try:
        hello = await start()

        def connected() -> None:
            observer.connected()
            if ready_file:
                write_ready(Path(ready_file), hello.executor_id)

        link = SchedulerLink(
            config.scheduler,
            hello,
            loop,
            peer_timeout_s=config.peer_timeout_s,
            on_connected=connected,
            on_report=lambda: observer.observe(loop.stats, loop.ended),
        )
        running = asyncio.ensure_future(link.run())
        stopping = asyncio.ensure_future(stop.wait())
        tasks = [running, stopping]
        await asyncio.wait([*tasks, crashed], return_when=asyncio.FIRST_COMPLETED)
        if crashed.done():
            raise InternalError(f"the step loop ended: {crashed.result()!r}") from crashed.result()
        if running.done():
            running.result()
        _log.info("stopping")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(loop.stop)
        observer.observe(loop.stats, loop.ended)
        await asyncio.to_thread(telemetry.shutdown)


def write_ready(path: Path, executor_id: str) -> None:
    """`path` appears with its whole content, or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(f"{executor_id}\n", encoding="ascii")
    partial.replace(path)


def _set_from_thread(
    event_loop: asyncio.AbstractEventLoop, future: asyncio.Future[BaseException], error: BaseException
) -> None:
    def tell() -> None:
        if not future.done():
            future.set_result(error)

    event_loop.call_soon_threadsafe(tell)
