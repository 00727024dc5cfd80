"""A GPU that others fill: one line with what is needed, what is free, who holds the rest and what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor import app, device_room
from executor.__main__ import main
from executor.device_room import DeviceFullError, DeviceRoom, DeviceState, Holder, look_at, refusal, who_holds
from rorqual.core.errors import ConfigError

GIB = 1 << 30


def state(free: int, holders: Sequence[Holder] = (), own: int = 0) -> DeviceState:
    """Of an 80 GiB GPU; in GiB."""
    return DeviceState(
        name="NVIDIA H100", total_bytes=80 * GIB, free_bytes=free * GIB, own_bytes=own * GIB, holders=holders
    )


ONE = [Holder(4711, "python3.11", 70 * GIB)]


def test_a_full_device_is_one_line_with_all_that_a_person_needs() -> None:
    room = DeviceRoom(lambda: state(10, ONE))
    room.require(10 * GIB)
    with pytest.raises(DeviceFullError) as caught:
        room.require(29 * GIB + GIB // 3)
    assert caught.value.message == (
        "NVIDIA H100 has no room for the model: the weights alone take 29.3 GiB, steps and KV cache take more, and "
        "10.0 GiB of 80.0 GiB are free; 70.0 GiB are held by process 4711 (python3.11, 70.0 GiB): end what holds it (kill "
        "4711), choose another GPU with CUDA_VISIBLE_DEVICES, or serve on the CPU with --device cpu"
    )


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (state(80), "no other process holds memory of it"),
        (state(50, own=30), "no other process holds memory of it"),
        (state(10), "70.0 GiB are held by other processes, which the driver does not name here (in a container"),
        (
            state(10, [Holder(1, "", 70 * GIB)]),
            "held by process 1 (its name is not visible from here, 70.0 GiB)",
        ),
        (state(10, [Holder(1, "a", None)]), "70.0 GiB are held by process 1 (a)"),
        (
            state(10, [Holder(1, "a", 20 * GIB)]),
            "process 1 (a, 20.0 GiB), processes that the driver does not name here (50.0 GiB)",
        ),
        (
            state(10, [Holder(n, "a", n * GIB) for n in range(1, 7)]),
            "process 6 (a, 6.0 GiB), process 5 (a, 5.0 GiB), process 4 (a, 4.0 GiB), process 3 (a, 3.0 GiB), 2 more",
        ),
    ],
)
def test_who_holds_it(now: DeviceState, told: str) -> None:
    assert told in who_holds(now)


def test_the_cure_fits_the_cause() -> None:
    assert "take a larger GPU, or a smaller model" in refusal(state(80), 90 * GIB, "the model").message
    alone = refusal(state(1, own=79), 78 * GIB, "the model").message
    assert "lower --max-num-batched-tokens" in alone
    assert "kill" not in alone
    unnamed = refusal(state(1, [Holder(7, "", None)]), 2 * GIB, "the model").message
    assert "end what holds it, choose another GPU" in unnamed  # a number of another namespace must not be killed here


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError("CUDA error: out of memory")],
)
def test_memory_that_runs_out_later_is_told_alike(error: RuntimeError) -> None:
    room = DeviceRoom(lambda: state(1, ONE))
    words = "has no room for the first steps: the model's size is not known yet"
    with pytest.raises(DeviceFullError, match=words), room.needed_for("the first steps"):
        raise error
    with pytest.raises(RuntimeError, match="another"), room.needed_for("the first steps"):
        raise RuntimeError("another fault")


def test_a_cpu_refuses_nothing() -> None:
    room = DeviceRoom.of(torch.device("cpu"))
    room.require(1 << 60)
    with pytest.raises(torch.OutOfMemoryError), room.needed_for("x"):
        raise torch.OutOfMemoryError("x")
    error = ConfigError("too little")
    assert room.explain(error) is error


def test_a_cache_without_room_is_told_with_who_holds_it() -> None:
    told = DeviceRoom(lambda: state(10, ONE)).explain(ConfigError("no block fits", field="kv_cache_bytes"))
    assert told.message == "no block fits; 10.0 GiB are free, 70.0 GiB are held by process 4711 (python3.11, 70.0 GiB)"
    assert told.field == "kv_cache_bytes"


class FakeNvml(SimpleNamespace):
    """What pynvml answers. `sees`: whether processes are in this namespace."""

    def __init__(self, processes: Sequence[Any], *, sees: bool = True, fails: bool = False) -> None:
        def name(pid: int) -> bytes:
            if not sees:
                raise RuntimeError("NVML_ERROR_NOT_FOUND")
            return b"/usr/bin/python3.11 -m vllm"

        def start() -> None:
            if fails:
                raise RuntimeError("NVML_ERROR_LIBRARY_NOT_FOUND")

        def graphics(handle: object) -> list[Any]:
            raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")

        super().__init__(
            nvmlInit=start,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * GIB, free=10 * GIB),
            nvmlDeviceGetName=lambda handle: "NVIDIA H100",
            nvmlDeviceGetComputeRunningProcesses=lambda handle: processes,
            nvmlDeviceGetGraphicsRunningProcesses=graphics,
            nvmlSystemGetProcessName=name,
        )


def process(pid: int, gib: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if gib is None else gib * GIB)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(device_room, "nvml_index", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    return torch.device("cuda", 0)


def test_the_driver_is_asked(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([process(os.getpid(), 6), process(4711, 64)]))
    assert look_at(cuda) == DeviceState(
        name="NVIDIA H100",
        total_bytes=80 * GIB,
        free_bytes=10 * GIB,
        own_bytes=6 * GIB,
        holders=[Holder(4711, "python3.11", 64 * GIB)],
    )


def test_in_a_container_processes_have_no_names_or_are_not_there(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([process(10**7, None)], sees=False))
    assert look_at(cuda).holders == [Holder(10**7, "", None)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]))
    now = look_at(cuda)
    assert (now.own_bytes, now.others_bytes) == (5 * GIB, 65 * GIB)
    assert "65.0 GiB are held by other processes, which the driver does not name here" in who_holds(now)


@pytest.mark.parametrize(("is_host", "name"), [(True, "python3.11"), (False, "")])
def test_a_number_of_another_namespace_is_given_no_name_of_this_one(
    is_host: bool, name: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_room, "is_host_namespace", lambda: is_host)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([process(1, 70)]))
    now = look_at(cuda)
    assert now.holders == [Holder(1, name, 70 * GIB)]
    assert ("kill 1" in refusal(now, GIB, "the model").message) is is_host


def test_without_nvml_cuda_is_asked(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], fails=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 9 * GIB))
    assert look_at(cuda) == DeviceState(name="a GPU", total_bytes=9 * GIB, free_bytes=3 * GIB, own_bytes=5 * GIB)

    def none_left(device: torch.device) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", none_left)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=9 * GIB))
    assert look_at(cuda).free_bytes == 0


@pytest.mark.parametrize("when", ["before the weights", "while they are loaded"])
def test_the_process_ends_with_that_one_line(
    when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served_model: Any
) -> None:
    """The whole start, with a device that is the CPU and says that it is full."""
    free = 0 if when == "before the weights" else 79
    monkeypatch.setattr(DeviceRoom, "of", classmethod(lambda cls, device: cls(lambda: state(free, ONE))))
    if free:

        def full(*args: object, **kwargs: object) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        monkeypatch.setattr(app, "TorchBackend", full)
    assert main(["--device=cpu", *served_model.flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("executor: NVIDIA H100 has no room for the model: the weights alone take 0.0 GiB")
    assert "process 4711 (python3.11, 70.0 GiB)" in lines[-1]
    assert not any("Traceback" in line for line in lines)
