"""The ledger's arithmetic, and how many blocks the KV cache gets, with a device whose figures are given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.memory import Ledger, MemoryMeter, kv_cache_room, plan_cache
from rorqual.core.errors import ConfigError

GIB = 1 << 30


class Device:
    """What the allocator and the driver would say."""

    def __init__(self, reserved: int = 0, held: int = 0) -> None:
        self.reserved, self.held = reserved, held

    def take(self, num_bytes: int, *, unseen: int = 0) -> None:
        """By the allocator, and by libraries behind its back."""
        self.reserved += num_bytes
        self.held += num_bytes + unseen

    def meter(self) -> MemoryMeter:
        return MemoryMeter(lambda: self.reserved, lambda: self.held)


def test_each_phase_is_an_entry_and_they_add_up_to_what_the_driver_shows() -> None:
    device = Device(held=600)
    meter = device.meter()
    device.take(30_000)
    assert meter.close("weights") == 30_000
    device.take(4_000)
    meter.close("workspace")
    device.take(90_000)
    meter.close("kv_cache")
    device.take(100, unseen=700)
    assert meter.close("graphs") == 800
    device.take(50)
    ledger = meter.ledger()
    assert (ledger.context, ledger.weights, ledger.workspace) == (600, 30_000, 4_000)
    assert (ledger.kv_cache, ledger.graphs, ledger.other) == (90_000, 800, 50)
    assert ledger.total == ledger.device_used == device.held
    assert ledger.is_true


@pytest.mark.parametrize(("unseen", "is_true"), [(2_000, True), (2_100, False)])
def test_what_no_entry_knows_of_is_told_above_two_percent(unseen: int, is_true: bool) -> None:
    device = Device()
    meter = device.meter()
    device.take(100_000, unseen=unseen)
    meter.close("weights")
    assert meter.ledger().is_true is is_true


def test_without_a_driver_nothing_is_claimed_of_it() -> None:
    device = Device(reserved=1_000)
    meter = MemoryMeter(lambda: device.reserved, lambda: 0)
    device.take(500)
    meter.close("weights")
    device.take(77)
    meter.close("kv_cache", 4_000)  # pages that are taken once they are written
    device.take(9)
    assert meter.ledger() == Ledger(weights=500, workspace=0, kv_cache=4_000)
    assert meter.ledger().is_true
    assert not any("driver" in line for line in meter.ledger().lines())


def test_the_ledger_names_every_entry_on_a_gpu() -> None:
    ledger = Ledger(weights=7 << 20, workspace=0, kv_cache=0, context=1 << 20, device_used=8 << 20)
    text = "\n".join(ledger.lines())
    for name in ("context", "weights", "workspace", "graphs", "KV cache", "other", "sum", "the driver shows"):
        assert name in text


@given(
    total=st.integers(1, 200 * GIB),
    utilization=st.floats(0.01, 1.0),
    held=st.integers(0, 200 * GIB),
    others=st.integers(0, 200 * GIB),
    to_come=st.integers(0, 10 * GIB),
)
def test_the_cache_keeps_this_process_within_its_share_and_the_device(
    total: int, utilization: float, held: int, others: int, to_come: int
) -> None:
    free = max(total - held - others, 0)
    room = kv_cache_room(
        total_bytes=total, utilization=utilization, held_bytes=held, free_bytes=free, to_come_bytes=to_come
    )
    assert room >= 0
    if room:
        assert held + to_come + room <= total * utilization
        assert room + to_come <= free
        # And not a byte less than it may.
        assert held + to_come + room + 1 > total * utilization - 1 or room + to_come == free


def plan(**kwargs: Any) -> Any:
    values = {"block_bytes": 1000, "max_num_seqs": 4, "max_model_len": 640, "is_len_fixed": False}
    values |= {"memory_bytes": GIB, "kv_cache_bytes": 0}
    return plan_cache(**{**values, **kwargs})


def test_a_gpu_gives_all_that_is_left_to_cached_prefixes() -> None:
    assert plan(memory_bytes=100_999).num_blocks == 40
    assert plan(memory_bytes=100_999, takes_all=True).num_blocks == 100
    assert plan(memory_bytes=100_999, takes_all=True, kv_cache_bytes=50_000).num_blocks == 50


def test_advice_where_not_even_a_block_fits_names_its_bytes() -> None:
    for fixed in (True, False):
        with pytest.raises(ConfigError, match="there are 1: raise --kv-cache-bytes to 10000, or to 1000 at least"):
            plan(kv_cache_bytes=1, is_len_fixed=fixed)
    with pytest.raises(ConfigError, match="raise --gpu-memory-utilization"):
        plan(memory_bytes=999, takes_all=True)
    with pytest.raises(ConfigError, match="lower --max-model-len to 64"):
        plan(kv_cache_bytes=1000, is_len_fixed=True)
    assert plan(kv_cache_bytes=1000).max_model_len == 64
