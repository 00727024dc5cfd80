"""One executor process: loads, sizes, warms up, connects, and ends cleanly."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.config import ExecutorConfig
from rorqual.core.errors import ConfigError
from rorqual.grammar import open_engine
from rorqual.grammar_trial import GrammarTrial
from rorqual.telemetry import Telemetry
from rorqual.v1 import common_pb2, executor_pb2

from .constraint import Constraints
from .device_room import DeviceRoom
from .gpu.backend import GpuBackend, why_not
from .kv_cache import LatentCache
from .link import PROTOCOL_VERSION
from .memory import TOLERANCE, CachePlan, Ledger, MemoryMeter, device_name, plan_cache, total_bytes
from .model.config import ModelConfig, load_config
from .order_loop import OrderLoop, StepLimits
from .serve import model_folder, serve_loop, served_name
from .torch_backend import TorchBackend
from .weights import model_fingerprint, open_source, resolve_dtype

_log = logging.getLogger("executor")


class Backend(Protocol):
    """How a model is computed: with torch, or with the compiled kernels."""

    @property
    def config(self) -> ModelConfig: ...

    def kv_room(self, config: ExecutorConfig, meter: MemoryMeter) -> int:
        """Bytes left for the KV cache."""

    def make_loop(self, cache: LatentCache, limits: StepLimits, *, traced: bool) -> OrderLoop:
        """The loop over `cache`, not yet started."""

    def warm_up(self, meter: MemoryMeter) -> None:
        """What must run on the loop's thread before it steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model with its memory, ready to be stepped."""

    config: ExecutorConfig  # with every size filled in
    backend: Backend
    cache: LatentCache
    plan: CachePlan
    fingerprint: bytes
    meter: MemoryMeter
    room: DeviceRoom


def prepare(config: ExecutorConfig) -> Prepared:
    """Load and size. Raises CheckpointError and ConfigError before anything is served; DeviceFullError where the device
    has no room for the model."""
    device = resolve_device(config.device)
    room = DeviceRoom.of(device)
    with room.needed_for("the model"):
        return _prepare_on(device, config, room)


def _prepare_on(device: torch.device, config: ExecutorConfig, room: DeviceRoom) -> Prepared:
    config = config.sized(on_gpu=device.type == "cuda")
    path = model_folder(config)
    torch.set_num_threads(num_threads(config))
    model_config = load_config(path)
    is_len_fixed = config.max_model_len > 0
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    if max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} is longer than the model's positions go "
            f"(max_position_embeddings {model_config.max_position_embeddings} in {path / 'config.json'})",
            field="max_model_len",
        )
    dtype = resolve_dtype(config.dtype, device)
    meter, started_s = MemoryMeter.of(device), time.monotonic()
    with (
        _progress_bar() as progress,
        open_source(
            path, dtype=dtype, device=device, load_format=config.load_format, seed=config.seed, progress=progress
        ) as source,
    ):
        room.require(source.num_elements * dtype.itemsize)
        reason = why_not(model_config, dtype, device)
        backend: Backend
        if reason:
            backend = TorchBackend(source, config, num_threads(config))
        else:
            backend = GpuBackend(source, config, max_model_len)
    if reason and device.type == "cuda":
        _log.warning("the compiled kernels are not used: %s; PyTorch's operations are, which are slower", reason)
    is_dummy = config.load_format == "dummy"
    fingerprint = model_fingerprint(
        path,
        backend.config,
        dtype=dtype,
        kv_dtype=dtype,
        deterministic=config.deterministic,
        random_seed=config.seed if is_dummy else None,
        extra={"random_numbers": device.type} if is_dummy else None,
    )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading passed through
    meter.close("weights")
    memory_bytes = backend.kv_room(config, meter)
    try:
        plan = plan_cache(
            block_bytes=LatentCache.block_bytes(backend.config, dtype),
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            is_len_fixed=is_len_fixed,
            kv_cache_bytes=config.kv_cache_bytes,
            memory_bytes=memory_bytes,
            takes_all=device.type == "cuda",
        )
    except ConfigError as error:
        raise room.explain(error) from None
    if plan.max_model_len < max_model_len:
        _log.warning(
            "the KV cache holds %d tokens: histories end there, short of the model's %d (--kv-cache-bytes for more)",
            plan.max_model_len,
            max_model_len,
        )
    cache = LatentCache(backend.config, plan.num_blocks, dtype=dtype, device=device)
    meter.close("kv_cache", cache.bytes_per_block * cache.num_blocks)
    gc.freeze()  # nothing of the model will ever be garbage: collections need not look at it
    _log.info(
        "loaded %s from %s in %.1f s: %s, fingerprint %s",
        backend.config.model_type,
        path if not is_dummy else f"random numbers in the shape of {path}",
        time.monotonic() - started_s,
        str(dtype).removeprefix("torch."),
        fingerprint.hex()[:12],
    )
    return Prepared(
        config=config,
        backend=backend,
        cache=cache,
        plan=plan,
        fingerprint=fingerprint,
        meter=meter,
        room=room,
    )


def resolve_device(requested: str) -> torch.device:
    """`auto`, `cpu` or `cuda`; auto takes a GPU where torch sees one. ConfigError where there is none to take."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: PyTorch sees no GPU; check the driver with nvidia-smi and that a CUDA build of PyTorch is "
            "installed, or use --device cpu",
            field="device",
        )
    return torch.device("cuda" if requested != "cpu" and torch.cuda.is_available() else "cpu")


def num_threads(config: ExecutorConfig) -> int:
    """Threads that compute: every core this process may use, unless told otherwise.

    Measured on 2 cores that the other processes and more besides shared, 16 streams of the embedded shape: 250
    tokens/s with two threads, 150 with one.
    """
    return config.num_threads or len(os.sched_getaffinity(0))


async def serve(prepared: Prepared, stop: asyncio.Event, ready_file: str = "") -> None:
    """Connect and step until `stop` is set. Raises LinkRefusedError, and InternalError if the step loop ended."""
    config = prepared.config
    executor_id = uuid.uuid4().hex
    path, model_name = model_folder(config), served_name(config)
    telemetry = Telemetry("executor", config.telemetry, instance=executor_id)
    backend, cache = prepared.backend, prepared.cache
    limits = StepLimits(
        vocab_size=backend.config.vocab_size,
        max_model_len=prepared.plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        deterministic=config.deterministic,
    )
    loop = backend.make_loop(cache, limits, traced=telemetry.enabled)
    grammars = open_engine(path, limits.vocab_size) if loop.takes_grammars else None
    # A tokenizer has tried the grammars of its requests; other callers of the scheduler send what they like.
    trial = GrammarTrial(path, limits.vocab_size) if grammars is not None else None
    if trial is not None:
        trial.start()
    loop.use_constraints(Constraints(grammars, limits.vocab_size, trial=trial))

    async def ready() -> executor_pb2.Hello:
        with prepared.room.needed_for("the first steps"):
            await asyncio.wrap_future(loop.start(lambda: backend.warm_up(prepared.meter)))
        ledger = prepared.meter.ledger()
        log_ledger(ledger)
        return make_hello(
            config,
            backend.config,
            executor_id=executor_id,
            model_name=model_name,
            fingerprint=prepared.fingerprint,
            plan=prepared.plan,
            block_bytes=cache.bytes_per_block,
            ledger=ledger,
            device=cache.device,
            takes_grammars=grammars is not None,
        )

    try:
        await serve_loop(config, loop, ready, telemetry, model_name, stop, ready_file)
    finally:
        if trial is not None:
            trial.close()


def log_ledger(ledger: Ledger) -> None:
    for line in ledger.lines():
        _log.info("memory: %s", line)
    if not ledger.is_true:
        _log.warning(
            "memory: the entries differ from what the driver shows by more than %d %%: something outside the step "
            "loop takes memory, or another process started on the device meanwhile",
            round(100 * TOLERANCE),
        )


def make_hello(
    config: ExecutorConfig,
    model: ModelConfig,
    *,
    executor_id: str,
    model_name: str,
    fingerprint: bytes,
    plan: CachePlan,
    block_bytes: int,
    ledger: Ledger,
    device: torch.device,
    takes_grammars: bool = False,
) -> executor_pb2.Hello:
    """What this executor is; the inventory is added at each connect."""
    return executor_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        executor_id=executor_id,
        device=executor_pb2.DeviceInfo(kind=device.type, name=device_name(device), memory_bytes=total_bytes(device)),
        cache_groups=[
            executor_pb2.CacheGroup(
                name="mla",
                block_size=BLOCK_SIZE,
                block_bytes=block_bytes,
                num_blocks=plan.num_blocks,
                prefix_multiple=BLOCK_SIZE,
            )
        ],
        model=common_pb2.ModelInfo(
            name=model_name,
            max_model_len=plan.max_model_len,
            vocab_size=model.vocab_size,
            fingerprint=fingerprint,
            deterministic=config.deterministic,
            takes_grammars=takes_grammars,
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_draft_tokens=0,
        rank=0,
        group_size=1,
        memory=executor_pb2.MemoryLedger(
            weights_bytes=ledger.weights,
            workspace_bytes=ledger.workspace,
            graphs_bytes=ledger.graphs,
            kv_cache_bytes=ledger.kv_cache,
            context_bytes=ledger.context,
            other_bytes=ledger.other,
            device_used_bytes=ledger.device_used,
        ),
    )


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """On a terminal a bar; elsewhere a line for each tenth."""
    if not sys.stderr.isatty():
        yield _log_tenths()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _log_tenths() -> Callable[[int, int], None]:
    """A progress callback that logs; loads under 3 s stay silent."""
    started_s = time.monotonic()
    logged = 0

    def progress(done: int, total: int) -> None:
        nonlocal logged
        tenth = 10 * done // max(total, 1)
        if tenth > logged and time.monotonic() - started_s > 3.0:
            logged = tenth
            _log.info("loading weights: %d %% of %.1f GiB", 10 * tenth, total / 2**30)

    return progress
