"""A process gives back what it does not use, without being asked by the number of its objects."""

from __future__ import annotations

import asyncio
import gc
import weakref

from rorqual.core.garbage import give_back_memory, resident_bytes

SIZE = 64 << 20


class Cycle:
    def __init__(self) -> None:
        self.me = self
        self.data = bytes(bytearray(b"x") * SIZE)


async def test_what_lies_in_cycles_is_freed_when_the_process_has_grown() -> None:
    gc.collect()
    gc.disable()
    try:
        keeper = asyncio.create_task(give_back_memory(lambda: True, interval_s=0, growth_bytes=SIZE // 2))
        await asyncio.sleep(0)
        before = resident_bytes()
        cycle = Cycle()
        assert resident_bytes() >= before + SIZE // 2
        gone = weakref.ref(cycle)
        del cycle
        async with asyncio.timeout(20):
            while gone() is not None:
                await asyncio.sleep(0)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        assert resident_bytes() < before + SIZE // 2
    finally:
        gc.enable()


async def test_what_grew_old_under_load_is_freed_once_that_ends() -> None:
    """While it is busy the process looks among newer objects alone; it remembers that it has grown."""
    gc.collect()
    gc.disable()
    busy = True
    looks: list[bool] = []

    def is_idle() -> bool:
        looks.append(not busy)
        return not busy

    try:
        keeper = asyncio.create_task(give_back_memory(is_idle, interval_s=0, growth_bytes=SIZE // 2))
        await asyncio.sleep(0)
        cycle = Cycle()
        for _ in range(2):
            gc.collect(1)  # it grows old
        gone = weakref.ref(cycle)
        del cycle
        async with asyncio.timeout(20):
            while len(looks) < 5:
                await asyncio.sleep(0)
            assert gone() is not None
            busy = False
            while gone() is not None:
                await asyncio.sleep(0)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    finally:
        gc.enable()
