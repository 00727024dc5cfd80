"""The whole executor with a small random model: as a process, and its tokens in deterministic mode."""

from __future__ import annotations

import asyncio
import copy as copies
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from executor.app import Prepared, prepare, serve
from executor.memory import plan_cache
from executor.model.deepseek import DeepseekModel
from executor.observe import StepObserver
from executor.torch_backend import TorchBackend
from rorqual.core.config import ExecutorConfig, TelemetryConfig
from rorqual.core.errors import ConfigError, InternalError
from rorqual.telemetry import Telemetry
from tests.support.executor_fakes import Driven, FakeScheduler, admit, copy, drop, extend, prefill

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def settings(folder: Path, **kwargs: Any) -> ExecutorConfig:
    values: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 272,
        "dtype": "float32",
        "kv_cache_bytes": 64 * 2 * 80 * 4 * 64,
        "num_threads": 1,
        **kwargs,
    }
    return ExecutorConfig(**values)


@pytest.fixture(scope="module")
def deterministic(model_folder: Path) -> Prepared:
    return prepare(settings(model_folder, deterministic=True))


def prompt(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 307, n).tolist()


def model_of(prepared: Prepared) -> DeepseekModel:
    assert isinstance(prepared.backend, TorchBackend)
    return prepared.backend.model


def driven(prepared: Prepared, **limits: Any) -> Driven:
    """Over the same memory, which holds whatever was there."""
    values = {"max_num_seqs": 16, "max_num_batched_tokens": 272, "deterministic": prepared.config.deterministic}
    return Driven(
        model_of(prepared),
        cache=prepared.cache,
        **{"vocab_size": 307, "max_model_len": prepared.plan.max_model_len, **values, **limits},
    )


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 2**40 + 1, "repetition_penalty": 1.2},
]


def alone(prepared: Prepared, tokens: Sequence[int], max_total: int, **sampling: Any) -> list[int]:
    d = driven(prepared)
    d.order(admit(1, tokens, range(8), max_total=max_total, **sampling), prefill(1, tokens))
    d.run()
    return d.report()[1].token_ids


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_deterministic_tokens_do_not_depend_on_batch_chunks_cache_or_resume(
    deterministic: Prepared, sampling: dict[str, Any]
) -> None:
    tokens = prompt(150, 1)
    expected = alone(deterministic, tokens, 170, **sampling)
    assert len(expected) == 20
    deterministic.cache.fill_(float("nan"))

    # Among others that come and go, in chunks that end at block edges, with limits that make it pause.
    d = driven(deterministic)
    for i in range(2, 8):
        other = prompt(5 + 17 * i, i)
        d.order(admit(i, other, [3 * i + 10, 3 * i + 11, 3 * i + 12], temperature=0.9, seed=i, max_total=150))
        d.order(prefill(i, other, 0, 64 if len(other) > 64 else None))
        d.order(*([prefill(i, other, 64)] if len(other) > 64 else []))
    d.step(3)
    d.order(admit(1, tokens, [3, 9, 4], max_total=170, limit=160, **sampling))
    for start in (0, 64, 128):
        d.order(prefill(1, tokens, start, min(start + 64, 150)))
        d.step(2)
    d.step(4)
    d.order(*(drop(i) for i in range(3, 8)))
    d.run()
    d.order(extend(1, [], 192))
    d.run()
    assert d.report()[1].token_ids == expected

    # Resumed: after every number of tokens from here on, on the cached prompt blocks or from nothing.
    for held in (1, 17):
        history = tokens + expected[:held]
        again = driven(deterministic)
        again.order(admit(1, history, [60, 61, 62], num_prompt=150, max_total=170, **sampling))
        again.order(prefill(1, history, 0, 128), prefill(1, history, 128))
        again.run()
        assert again.report()[1].token_ids == expected[held:]
        known = history[:128] if "repetition_penalty" in sampling else ()
        again.order(
            admit(2, history, [3, 9, 63], num_prompt=150, num_cached=128, max_total=170, known=known, **sampling),
            prefill(2, history, 128),
        )
        again.run()
        assert again.report()[2].token_ids == expected[held:]


def test_a_copied_block_is_as_good_as_a_computed_one(deterministic: Prepared) -> None:
    tokens = prompt(128, 3)
    tokens += prompt(5, 6)
    d = driven(deterministic)
    d.order(admit(1, tokens, [0, 1, 2], max_total=140), prefill(1, tokens))
    d.step(4)
    d.order(copy(1, 7, 64), admit(2, tokens, [0, 7, 8], num_cached=128, max_total=140), prefill(2, tokens, 128))
    d.run()
    assert d.report()[2].token_ids == d.report()[1].token_ids


def test_the_default_mode_serves_the_same_histories(model_folder: Path) -> None:
    prepared = prepare(settings(model_folder))
    tokens = prompt(100, 4)
    expected = alone(prepared, tokens, 130, temperature=0.0, logprobs=2, prompt_logprobs=0)
    d = driven(prepared)
    d.order(
        admit(1, tokens, [5, 6, 7], max_total=130, logprobs=2, prompt_logprobs=0),
        *(prefill(1, tokens, s, min(s + 30, 100)) for s in range(0, 100, 30)),
    )
    d.run()
    got = d.report()[1]
    assert len(got.token_ids) == 30
    assert len(got.prompt_logprobs) == 99
    # Float32 rounds otherwise in other shapes: up to a near tie, tokens are equal.
    for entry, a, b in zip(got.logprobs, got.token_ids, expected, strict=True):
        if a != b:
            assert entry.top_logprobs[0] - entry.top_logprobs[1] < 1e-4
            break


@asynccontextmanager
async def serving(prepared: Prepared, config: ExecutorConfig, ready: Path) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(serve(dataclasses.replace(prepared, config=config), stop, str(ready)))
    try:
        yield
    finally:
        stop.set()
        await task


async def test_serve_says_hello_with_all_that_it_is(
    deterministic: Prepared, model_folder: Path, tmp_path: Path
) -> None:
    scheduler = FakeScheduler()
    port = await scheduler.start()
    config = settings(model_folder, deterministic=True, scheduler=f"127.0.0.1:{port}")
    switch_interval = sys.getswitchinterval()
    try:
        async with serving(deterministic, config, tmp_path / "ready"):
            hello = await scheduler.hello()
            tokens = prompt(150, 1)
            scheduler.order(admit(1, tokens, [0, 1, 2], max_total=160, temperature=1.0, seed=5), prefill(1, tokens))
            received = await scheduler.until(lambda r: r[1].finish)
            assert (tmp_path / "ready").read_text(encoding="ascii").strip() == hello.executor_id
    finally:
        sys.setswitchinterval(switch_interval)
        await scheduler.stop()
    assert received[1].token_ids == alone(deterministic, tokens, 160, temperature=1.0, seed=5)
    (group,) = hello.cache_groups
    assert (group.block_size, group.num_blocks, group.prefix_multiple) == (64, 64, 64)
    assert group.block_bytes == 2 * 64 * 80 * 4
    assert (hello.model.name, hello.model.vocab_size, hello.model.max_model_len) == ("small", 307, 1024)
    assert hello.model.deterministic
    assert len(hello.model.fingerprint) == 32
    assert (hello.max_num_seqs, hello.max_num_batched_tokens, hello.group_size) == (16, 272, 1)
    assert hello.memory.kv_cache_bytes == 64 * group.block_bytes


class Broken:
    """A model that fails after its warm-up."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self._model = model
        self._calls = 0

    def forward(self, batch: Any, kv_cache: Any) -> Any:
        self._calls += 1
        if self._calls > 3:
            raise RuntimeError("broken on purpose")
        return self._model.forward(batch, kv_cache)


async def test_a_step_loop_that_fails_ends_the_process(deterministic: Prepared, model_folder: Path) -> None:
    scheduler = FakeScheduler()
    port = await scheduler.start()
    config = settings(model_folder, scheduler=f"127.0.0.1:{port}")
    backend = copies.copy(deterministic.backend)
    backend.model = Broken(model_of(deterministic))  # type: ignore[attr-defined]
    switch_interval = sys.getswitchinterval()
    try:
        prepared = dataclasses.replace(deterministic, config=config, backend=backend)
        task = asyncio.create_task(serve(prepared, asyncio.Event()))
        await scheduler.hello()
        scheduler.order(admit(1, [1, 2], [0], max_total=9), prefill(1, [1, 2]))
        with pytest.raises(InternalError, match="broken on purpose"):
            await asyncio.wait_for(task, 20.0)
    finally:
        sys.setswitchinterval(switch_interval)
        await scheduler.stop()


def start_process(folder: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "executor", f"--model={folder}", *flags],
        cwd=ROOT,
        env={**os.environ, **environ},
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_the_process_connects_says_so_and_ends_on_sigterm(model_folder: Path, tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    port = await scheduler.start()
    ready = tmp_path / "ready"
    process = start_process(
        model_folder, "--load-format=dummy", f"--scheduler=127.0.0.1:{port}", RORQUAL_READY_FILE=str(ready)
    )
    try:
        hello = await asyncio.wait_for(scheduler.hellos.get(), 60.0)
        scheduler.order(admit(1, [1, 2, 3], [0], max_total=20), prefill(1, [1, 2, 3]))
        await scheduler.until(lambda r: r[1].finish)
        assert ready.read_text(encoding="ascii").strip() == hello.executor_id
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate, timeout=30.0)
        assert process.returncode == 0
        assert "Traceback" not in log
        assert "memory: KV cache" in log
    finally:
        process.kill()
        await scheduler.stop()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-model-len=4096"], "max_position_embeddings 1024"),
        (["--load-format=safetensors"], "safetensors"),
        (["--device=cuda"], "cuda"),
    ],
)
def test_what_cannot_be_served_is_refused_on_one_line(model_folder: Path, flags: list[str], text: str) -> None:
    process = start_process(model_folder, "--load-format=dummy", *flags)
    _, log = process.communicate(timeout=60.0)
    assert process.returncode == 2
    assert len(log.strip().splitlines()) == 1
    assert log.startswith("executor: ")
    assert text in log


def test_the_kv_cache_takes_what_it_is_told_and_no_more_than_it_needs() -> None:
    def plan(**kwargs: Any) -> Any:
        values = {"block_bytes": 1000, "max_num_seqs": 4, "max_model_len": 640, "is_len_fixed": False}
        values |= {"memory_bytes": 1 << 30}
        return plan_cache(**{**values, "kv_cache_bytes": 0, **kwargs})

    assert plan().num_blocks == 40
    assert plan(block_bytes=2**24).num_blocks == 40
    assert plan(block_bytes=2**26).num_blocks == 16
    lowered = plan(block_bytes=2**28)
    assert (lowered.num_blocks, lowered.max_model_len) == (4, 256)
    assert plan(kv_cache_bytes=25_500).num_blocks == 25
    with pytest.raises(ConfigError, match="raise --kv-cache-bytes to 10000 or lower --max-model-len to 320"):
        plan(kv_cache_bytes=5_999, is_len_fixed=True)
    with pytest.raises(ConfigError, match="raise --kv-cache-bytes"):
        plan(kv_cache_bytes=999)


def test_steps_and_sequences_become_metrics_and_spans(deterministic: Prepared) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("executor", TelemetryConfig(), exporter=exporter)
    observer = StepObserver(telemetry, "small")
    d = driven(deterministic)
    d.loop._traced = True
    tokens = prompt(80, 9)
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    d.order(
        admit(1, tokens, [0, 1], max_total=84, traceparent=f"00-{trace_id}-{parent_id}-01"),
        prefill(1, tokens, 0, 64),
        prefill(1, tokens, 64),
    )
    d.run()
    observer.observe(d.loop.stats, d.loop.ended)
    telemetry.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.name == "executor.sequence"
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace_id, parent_id)
    assert [event.name for event in span.events] == ["prefill_chunk", "prefill_chunk", "first_token", "finish"]
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time < span.end_time
    value = telemetry.registry.get_sample_value
    assert value("rorqual_executor_tokens_total", {"kind": "prefill"}) == 80
    assert value("rorqual_executor_tokens_total", {"kind": "decode"}) == 3
    assert value("rorqual_executor_steps_total", {"kind": "prefill"}) == 1
    assert value("rorqual_executor_steps_total", {"kind": "decode"}) == 3
    assert value("rorqual_executor_step_seconds_count", {"kind": "decode"}) == 3


def test_torch_stays_out_of_gradients(deterministic: Prepared) -> None:
    assert alone(deterministic, [1, 2, 3], 6, temperature=0.0)
    assert torch.is_grad_enabled()
