"""One step on the device: what is uploaded before it, its kernels or their graph, and what comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.kernels.prefill import plan_prefill
from rorqual.kernels.step_state import embed, scatter_words, step_advance, step_prepare

from ..constraint import Constraint
from ..kv_cache import LatentCache
from ..order_loop import Chunk, StepLimits
from ..sequences import LogprobItem
from .chunks import ChunkPlan, plan_chunks
from .model import ChunkRows, GpuModel, PrefillGroup
from .rows import ChosenTokens, DecodeRows, LaunchedRows
from .sampling import DeviceSampler, PromptLogprobs
from .upload import StepUpload

_log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""Steps that the device has and whose tokens the host has not: with two, the next one waits on the device before the
present one ends, and orders are applied at most one step later than they could be."""

_NUM_BUFFERS = MAX_IN_FLIGHT + 1


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has."""

    rows: LaunchedRows
    turn: int  # which of the buffers that come back
    with_logprobs: bool
    prompt_logprobs: Sequence[PromptLogprobs]


@dataclass(frozen=True, slots=True)
class GraphStats:
    """What the ladder of CUDA graphs took."""

    batch_sizes: tuple[int, ...]
    seconds: float
    num_bytes: int


def graph_batch_sizes(max_rows: int) -> tuple[int, ...]:
    """The ladder: finely where a step is short, and what padding costs is at most a sixth."""
    sizes = [1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    sizes += range(160, max(max_rows, 160) + 1, 32)
    kept = [size for size in sizes if size < max_rows]
    return (*kept, max_rows)


class GpuEngine:
    """Owns the decode set and what a step reads and writes besides the model; used by the loop's thread alone."""

    def __init__(self, model: GpuModel, limits: StepLimits) -> None:
        device, max_rows = model.device, limits.max_num_seqs
        self._model = model
        self._limits = limits
        self._device = device
        self._caches: Sequence[torch.Tensor] = ()
        max_blocks = -(-limits.max_model_len // BLOCK_SIZE)
        self.rows = DecodeRows(max_rows, max_blocks, device)
        self._sampler = DeviceSampler(max_rows, limits.vocab_size, _NUM_BUFFERS, device)
        self.rows.on_join = self._sampler.join
        self.rows.on_leave = self._sampler.leave
        self._new_positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._active = torch.zeros(max_rows, dtype=torch.uint8, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._sound = torch.zeros(max_rows, dtype=torch.uint8, device=device)
        self._results = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._logits = torch.empty((max_rows, limits.vocab_size), dtype=torch.float32, device=device)
        self._hidden = torch.empty((max_rows, model.config.hidden_size), dtype=torch.bfloat16, device=device)
        num_words = 2 * self.rows.max_changes + self._sampler.max_upload_words
        num_words += ChunkPlan.max_words(limits, max_blocks, model.max_keys)
        self._upload = StepUpload(num_words, _NUM_BUFFERS, device)
        pinned = device.type == "cuda"
        self._host_results = [torch.zeros(max_rows, dtype=torch.int32, pin_memory=pinned) for _ in range(_NUM_BUFFERS)]
        self._events = [_StepEvents(device) for _ in range(_NUM_BUFFERS)]
        self._turn = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._layer_graphs: dict[int, torch.cuda.CUDAGraph] = {}  # up to the final states, where masks are awaited
        self._graph_size_of = np.zeros(max_rows + 1, np.int64)  # by number of rows

    # Before serving.

    def use_cache(self, cache: LatentCache) -> None:
        """The KV memory of all steps from here on, and of the graphs that are captured."""
        self._caches = [layer.view(-1, BLOCK_SIZE, cache.width) for layer in cache.layers]

    def largest_step(self) -> None:
        """Every kernel at its largest: a full budget of chunk rows beside a full decode set. The rows are padding, so
        nothing of the cache is read or written; what the step takes of the device's memory stays taken."""
        limits, device = self._limits, self._device
        num_chunk_rows = limits.chunk_budget
        zeros = torch.zeros(num_chunk_rows, dtype=torch.int64, device=device)
        plan = plan_prefill([num_chunk_rows], [num_chunk_rows], num_heads=self._model.heads).to(device)
        start = limits.max_num_seqs
        group = PrefillGroup(start, start + num_chunk_rows, plan, num_chunk_rows, None, None)
        rows = ChunkRows(zeros.int(), zeros, zeros - 1, [group], [])
        logit_rows = torch.arange(start, dtype=torch.int32, device=device)
        self._mixed_kernels(start, start, ChunkPlan(rows, logit_rows, ()))
        self._decode_kernels(start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def capture(self) -> GraphStats:
        """Capture decode steps of every size of the ladder. Runs each once on padding rows, which write nothing."""
        started_s = time.monotonic()
        before = torch.cuda.memory_reserved(self._device)
        sizes = graph_batch_sizes(self._limits.max_num_seqs)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for size in reversed(sizes):  # the largest first: the smaller ones fit into its memory
                self._decode_kernels(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    self._decode_kernels(size)
                self._graphs[size] = graph
                layers = torch.cuda.CUDAGraph()
                with torch.cuda.graph(layers, pool=pool, stream=stream):
                    self._layers(size)
                self._layer_graphs[size] = layers
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        at = np.searchsorted(sizes, np.arange(self._limits.max_num_seqs + 1))
        self._graph_size_of = np.array(sizes)[at]
        return GraphStats(sizes, time.monotonic() - started_s, torch.cuda.memory_reserved(self._device) - before)

    # A step.

    def launch(self, chunks: Sequence[Chunk], num_compute: int) -> LaunchedStep:
        """Everything of one step onto the current stream: the first `num_compute` rows decode, the others' last chunks
        are among `chunks`."""
        rows = self.rows.launched(num_compute)
        num_rows = rows.num_rows
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        upload = self._upload
        upload.begin()
        # Chunks first: what lies in the same places as before is launched as before.
        plan = (
            plan_chunks(chunks, rows, upload, self._limits, self._model.max_keys, self._model.heads) if chunks else None
        )
        changes, changes_at = upload.reserve(2 * self.rows.num_pending_changes)
        num_changes = self.rows.changes(changes.reshape(-1, 2))
        self._sampler.put(upload)
        events = self._events[self._turn]
        events.begin()
        upload.send()
        if num_changes:
            scatter_words(self.rows.words, upload.view(changes_at, 2 * num_changes).view(-1, 2))
        self._sampler.apply(upload)
        prompt_logprobs: Sequence[PromptLogprobs] = ()
        if plan is None:
            size = int(self._graph_size_of[num_rows])
            if self.is_constrained:
                self._constrained_kernels(size or num_rows)
            elif size:
                self._graphs[size].replay()
            else:
                self._decode_kernels(num_rows)
        else:
            prompt_logprobs = self._mixed_kernels(num_compute, num_rows, plan)
        if num_rows:
            self._host_results[self._turn][:num_rows].copy_(self._results[:num_rows], non_blocking=True)
        with_logprobs = self._sampler.copy_logprobs(self._turn, rows)
        events.end()
        return LaunchedStep(rows, self._turn, with_logprobs, prompt_logprobs)

    def wait(self, step: LaunchedStep) -> tuple[npt.NDArray[np.int32], float]:
        """The step's results (a token, NOT_RUN or UNSOUND a row), and how long it took on the device, in seconds."""
        duration_s = self._events[step.turn].wait()
        return self._host_results[step.turn][: step.rows.num_rows].numpy().copy(), duration_s

    @property
    def is_constrained(self) -> bool:
        """Whether a sequence of the decode set has a grammar that holds now."""
        return self._sampler.is_constrained

    @property
    def constraints(self) -> list[Constraint]:
        """Those that hold now."""
        return self._sampler.constraints

    def _set_masks(self) -> None:
        """With no other step in flight, and before this one chooses: what the grammars allow in it."""
        if self.is_constrained:
            self._sampler.set_masks(lambda seq: self.rows.position_of(seq) + 1 - seq.num_prompt_tokens)

    @property
    def follows_tokens(self) -> bool:
        """Whether a sequence of the decode set has penalties or a grammar, whose tokens the host has to see."""
        return self._sampler.follows_tokens

    def logprobs(self, step: LaunchedStep, chosen: ChosenTokens, i: int) -> list[LogprobItem]:
        """Log-probabilities that the step brought for the `i`-th of `chosen`, where it wants any."""
        return self._sampler.logprobs(step.turn, step.rows, chosen, i)

    def _decode_kernels(self, num_rows: int) -> None:
        """A step of decode rows alone; what a graph captures."""
        self._choose(self._layers(num_rows), num_rows)

    def _layers(self, num_rows: int) -> torch.Tensor:
        """The final states of a step of decode rows alone."""
        self._prepare(num_rows, num_rows)
        return self._model.forward(num_rows, None, self._caches)

    def _constrained_kernels(self, num_rows: int) -> None:
        """`_decode_kernels`, in which the host finishes its masks while the layers run."""
        if num_rows in self._layer_graphs:
            self._layer_graphs[num_rows].replay()
            hidden = self._model.normed[:num_rows]
        else:
            hidden = self._layers(num_rows)
        self._set_masks()
        self._choose(hidden, num_rows)

    def _mixed_kernels(self, num_compute: int, num_rows: int, plan: ChunkPlan) -> Sequence[PromptLogprobs]:
        """A step with chunks."""
        model, chunks = self._model, plan.rows
        if num_rows:
            self._prepare(num_rows, num_compute)
        embed(chunks.token_ids, model.weights.embedding, model.x[num_compute : num_compute + chunks.num_rows])
        # Prompts' log-probabilities want all of their rows' final states.
        wanted = None if plan.prompt_parts else plan.logit_rows
        hidden = model.forward(num_compute, chunks, self._caches, wanted)
        if num_rows:
            chosen = hidden
            if wanted is None:
                chosen = torch.index_select(hidden, 0, plan.logit_rows, out=self._hidden[:num_rows])
            self._set_masks()
            self._choose(chosen, num_rows)
        return [self._sampler.prompt_logprobs(part, hidden, model) for part in plan.prompt_parts]

    def _prepare(self, num_rows: int, num_compute: int) -> None:
        model = self._model
        step_prepare(
            self.rows.slots[:num_rows],
            self.rows.state,
            self.rows.block_tables,
            model.weights.embedding,
            x=model.x[:num_compute],
            positions=model.positions[:num_compute],
            slot_mapping=model.slot_mapping[:num_compute],
            kv_lens=model.kv_lens[:num_compute],
            row_tables=model.row_tables[:num_compute],
            new_positions=self._new_positions[:num_rows],
            active=self._active[:num_rows],
        )

    def _choose(self, hidden: torch.Tensor, num_rows: int) -> None:
        logits = self._logits[:num_rows]
        self._model.logits(hidden, logits)
        slots = self.rows.slots[:num_rows]
        self._sampler.sample(
            logits,
            slots,
            self._new_positions[:num_rows],
            self._active[:num_rows],
            tokens=self._tokens[:num_rows],
            sound=self._sound[:num_rows],
        )
        step_advance(
            slots,
            self.rows.state,
            tokens=self._tokens[:num_rows],
            sound=self._sound[:num_rows],
            active=self._active[:num_rows],
            results=self._results[:num_rows],
        )


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _StepEvents:
    """When a step began and ended on the device; on a CPU, when it was launched."""

    def __init__(self, device: torch.device) -> None:
        self._began = _timing_event() if device.type == "cuda" else None
        self._ended = _timing_event() if device.type == "cuda" else None
        self._host_s = [0.0, 0.0]

    def begin(self) -> None:
        if self._began is not None:
            self._began.record()
        else:
            self._host_s[0] = time.perf_counter()

    def end(self) -> None:
        if self._ended is not None:
            self._ended.record()
        else:
            self._host_s[1] = time.perf_counter()

    def wait(self) -> float:
        """Wait for the end; seconds between the two."""
        if self._began is None or self._ended is None:
            return self._host_s[1] - self._host_s[0]
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3
