"""`--backend sim`: a process that speaks the executor's contract and computes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import uuid
from typing import Any

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.config import ExecutorConfig
from rorqual.core.errors import CheckpointError, ConfigError
from rorqual.core.garbage import collect_seldom
from rorqual.telemetry import Telemetry
from rorqual.v1 import executor_pb2

from ..serve import model_folder, serve_loop, served_name
from .device import SimConfig, SimExecutor
from .loop import SimLoop

_log = logging.getLogger("executor")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A simulated device, ready to be stepped."""

    config: ExecutorConfig
    loop: SimLoop


def prepare(config: ExecutorConfig) -> Prepared:
    """Size the device: vocabulary and longest history are the checkpoint's, of which only config.json is read.

    Raises CheckpointError and ConfigError.
    """
    config = config.sized(on_gpu=False)
    vocab_size, longest = (_size_of_model(config, key) for key in ("vocab_size", "max_position_embeddings"))
    max_model_len = min(config.max_model_len or longest, BLOCK_SIZE * config.sim_num_blocks)
    least = config.max_num_seqs * (1 + config.sim_num_drafts) + BLOCK_SIZE
    if config.max_num_batched_tokens < least:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} leaves no room for a chunk beside "
            f"{config.max_num_seqs} sequences with {config.sim_num_drafts} drafts each: give at least {least}",
            field="max_num_batched_tokens",
        )
    device = SimExecutor(
        SimConfig(
            executor_id=uuid.uuid4().hex,
            num_blocks=config.sim_num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_draft_tokens=config.sim_num_drafts,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            fingerprint=hashlib.blake2b(f"simulated {vocab_size}".encode(), digest_size=32).digest(),
            deterministic=config.deterministic,
            model_name=served_name(config),
            step_us=1000.0 * config.sim_step_ms,
            chunk_token_us=config.sim_chunk_token_us,
        )
    )
    return Prepared(config=config, loop=SimLoop(device))


def _size_of_model(config: ExecutorConfig, key: str) -> int:
    file = model_folder(config) / "config.json"
    try:
        value: Any = json.loads(file.read_text(encoding="utf-8-sig"))[key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file}: {key} cannot be read ({error!r})") from None
    if not isinstance(value, int) or value < 2:
        raise CheckpointError(f"{file}: {key} is {value!r}; a number above 1 is needed.")
    return value


async def serve(prepared: Prepared, stop: asyncio.Event, ready_file: str = "") -> None:
    """Connect and step until `stop` is set. Raises LinkRefusedError, and InternalError where the scheduler broke the
    contract (an order that none may send)."""
    config, loop, device = prepared.config, prepared.loop, prepared.loop.device

    async def start() -> executor_pb2.Hello:
        loop.start()
        collect_seldom()
        _log.info(
            "simulated: %d blocks, steps of %g ms and %g us a token of a chunk; tokens are made up",
            config.sim_num_blocks,
            config.sim_step_ms,
            config.sim_chunk_token_us,
        )
        hello = device.hello()
        del hello.inventory[:]  # the link adds it
        return hello

    telemetry = Telemetry("executor", config.telemetry, instance=device.config.executor_id)
    await serve_loop(config, loop, start, telemetry, device.config.model_name, stop, ready_file)
