"""A GPU without room for the model: how much is needed, how much is free, and who holds the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from rorqual.core.errors import ConfigError

from .memory import device_name, nvml_index

GIB = 1 << 30
WORTH_TELLING = 64 << 20
"""Bytes that nobody is told of: the driver's own, and rounding."""
MAX_HOLDERS = 4
HOST_PID_NAMESPACE = 0xEFFFFFFC
"""Linux's inode of the first PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h)."""


class DeviceFullError(ConfigError):
    """The device has no room for the model."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a device, as the driver tells."""

    pid: int
    name: str  # "": not visible from here, as of a process of another container
    num_bytes: int | None  # None: the driver does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Who holds what of a device, now. `own_bytes`: of this process; `holders`: the others, as far as they are known."""

    name: str
    total_bytes: int
    free_bytes: int
    own_bytes: int
    holders: Sequence[Holder] = ()

    @property
    def others_bytes(self) -> int:
        return max(self.total_bytes - self.free_bytes - self.own_bytes, 0)


def who_holds(state: DeviceState) -> str:
    """The others' share, and whose it is. Pure."""
    if state.others_bytes < WORTH_TELLING:
        return "no other process holds memory of it"
    known = sorted(state.holders, key=lambda holder: -(holder.num_bytes or 0))
    told = [_told(holder) for holder in known[:MAX_HOLDERS]]
    if len(known) > MAX_HOLDERS:
        told.append(f"{len(known) - MAX_HOLDERS} more")
    if not told:
        return (
            f"{_gib(state.others_bytes)} are held by other processes, which the driver does not name here (in a container "
            "it knows none of outside: ask nvidia-smi on the host)"
        )
    left = state.others_bytes - sum(holder.num_bytes or 0 for holder in known)
    if left > max(WORTH_TELLING, state.others_bytes // 10) and all(holder.num_bytes is not None for holder in known):
        told.append(f"processes that the driver does not name here ({_gib(left)})")
    return f"{_gib(state.others_bytes)} are held by {', '.join(told)}"


def refusal(state: DeviceState, needed_bytes: int, what: str) -> DeviceFullError:
    """Why `what`, which takes `needed_bytes` (0: not known) for weights, has no room, and the cure. Pure."""
    needed = f"the weights alone take {_gib(needed_bytes)}" if needed_bytes else "the model's size is not known yet"
    if needed_bytes > state.total_bytes:
        return DeviceFullError(
            f"{state.name} is too small: {needed} and it has {_gib(state.total_bytes)} in all; take a larger GPU, or a "
            "smaller model",
            field="device",
        )
    if state.others_bytes < WORTH_TELLING:
        cure = "lower --max-num-batched-tokens or --max-num-seqs, or take a larger GPU"
    else:
        pids = " ".join(str(holder.pid) for holder in state.holders if holder.name)
        end = f"end what holds it (kill {pids})" if pids else "end what holds it"
        cure = f"{end}, choose another GPU with CUDA_VISIBLE_DEVICES, or serve on the CPU with --device cpu"
    return DeviceFullError(
        f"{state.name} has no room for {what}: {needed}, steps and KV cache take more, and {_gib(state.free_bytes)} of "
        f"{_gib(state.total_bytes)} are free; {who_holds(state)}: {cure}",
        field="device",
    )


class DeviceRoom:
    """Refuses, in one line, what a device has no room for. `look`: the device's state now."""

    def __init__(self, look: Callable[[], DeviceState] | None) -> None:
        """None where there is nothing to look at, as on a CPU: then nothing is refused."""
        self._look = look
        self._needed_bytes = 0

    @classmethod
    def of(cls, device: torch.device) -> DeviceRoom:
        return cls((lambda: look_at(device)) if device.type == "cuda" else None)

    def require(self, num_bytes: int) -> None:
        """Weights of `num_bytes` are about to be loaded. Raises DeviceFullError where they are more than is free."""
        self._needed_bytes = num_bytes
        if self._look is not None and num_bytes > (state := self._look()).free_bytes:
            raise refusal(state, num_bytes, "the model")

    @contextmanager
    def needed_for(self, what: str) -> Iterator[None]:
        """Memory that runs out here is told as DeviceFullError."""
        try:
            yield
        except RuntimeError as error:  # torch.OutOfMemoryError is one; so is CUDA's own, while a context is made
            if self._look is None or not _is_out_of_memory(error):
                raise
            full = refusal(self._look(), self._needed_bytes, what)
        else:
            return
        raise full

    def explain(self, error: ConfigError) -> ConfigError:
        """A refusal for want of memory, with who holds it."""
        if self._look is None or (state := self._look()).others_bytes < WORTH_TELLING:
            return error
        return ConfigError(f"{error.message}; {_gib(state.free_bytes)} are free, {who_holds(state)}", field=error.field)


def look_at(device: torch.device) -> DeviceState:
    """Asks the driver through NVML, which needs no context on the device; where there is no NVML, CUDA."""
    handle = None
    with suppress(Exception):  # NVML's own errors, or no NVML
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(nvml_index(device))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        holders = _holders(pynvml, handle)
        own = next((holder.num_bytes for holder in holders if holder.pid == os.getpid()), None)
        if own is None and not is_host_namespace():
            # Its numbers are the host's: whose they are cannot be known here, and here they may be somebody else's.
            holders = [replace(holder, name="") for holder in holders]
        return DeviceState(
            name=_text(pynvml.nvmlDeviceGetName(handle)),
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
            # (In another PID namespace the driver does not know this process by its number.)
            own_bytes=torch.cuda.memory_reserved(device) if own is None else own,
            holders=[holder for holder in holders if holder.pid != os.getpid()],
        )
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # no context can be made: there is nothing left
        free, total = 0, torch.cuda.get_device_properties(device).total_memory
    return DeviceState(
        name=device_name(device),
        total_bytes=total,
        free_bytes=free,
        own_bytes=torch.cuda.memory_reserved(device),
    )


def is_host_namespace() -> bool:
    """Whether process ids mean here what they mean to the driver."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == HOST_PID_NAMESPACE
    except OSError:
        return False


def _holders(nvml: object, handle: object) -> list[Holder]:
    found: dict[int, Holder] = {}
    for kind in ("Compute", "Graphics"):
        with suppress(Exception):  # not every driver lists both
            for process in getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle):
                used = process.usedGpuMemory
                # Not available is None, or the largest number there is.
                known = int(used) if used is not None and int(used) < 1 << 62 else None
                found[process.pid] = Holder(process.pid, _process_name(nvml, process.pid), known)
    return list(found.values())


def _process_name(nvml: object, pid: int) -> str:
    """Its program's name; "" for one that this container does not see."""
    with suppress(Exception):
        return os.path.basename(_text(nvml.nvmlSystemGetProcessName(pid)).split(" ")[0])  # type: ignore[attr-defined]
    return ""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _told(holder: Holder) -> str:
    size = "" if holder.num_bytes is None else f", {_gib(holder.num_bytes)}"
    return f"process {holder.pid} ({holder.name or 'its name is not visible from here'}{size})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
