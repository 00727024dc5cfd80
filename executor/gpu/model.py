"""The DeepSeek model in compiled kernels: rows that decode and rows of chunks, through all layers, to logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from rorqual.kernels.abi import StreamWaitArgs
from rorqual.kernels.elementwise import mla_store, rms_norm
from rorqual.kernels.experts import make_experts_workspace, moe_combine, moe_experts
from rorqual.kernels.linear import (
    Tiling,
    absorb_q,
    absorb_v,
    blas_handle,
    choose_tiling,
    linear,
    linear_silu_mul,
    make_linear_workspace,
)
from rorqual.kernels.loader import KernelLibrary, current_stream, load
from rorqual.kernels.mla import make_workspace, mla_decode, plan_decode
from rorqual.kernels.moe import route
from rorqual.kernels.prefill import STATE_WIDTH, PrefillPlan, gather_latents, mla_prefill
from rorqual.kernels.step_state import embed

from ..model.mla import LATENT_NORM_EPS
from .launches import LayerLaunches, LayerProgram, OwnTensors, Pointers
from .weights import GpuAttention, GpuDense, GpuMoe, GpuWeights

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
QK = NOPE + ROPE
BESIDE_ROWS = 256
"""In a step of at most so many decode rows the shared experts read their weights while the router, whose kernels read next
to nothing, chooses the others. On an H200 with V2-Lite a step of 1 row took 3 % less, of 16 to 128 4 %, of 256 1 %. (Beside
chunks, launched one by one, it took 4 % more: a launch on another stream waits for the whole of the kernel before.)"""
MAX_RECORDED = 64
"""Steps of different sizes whose launches are kept, some 10 kB each."""


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Rows [start, end) of whole segments in the prefill form, and what one call attends to: all their keys, or of a
    history that is longer than a call takes, one slab of them. Slabs come in order."""

    start: int
    end: int
    plan: PrefillPlan
    num_keys: int  # of the plan, over all segments
    block_tables: torch.Tensor | None  # int32 [segments, n]; None: nothing is cached, the rows are the keys
    k_starts: torch.Tensor | None  # int32 [segments + 1]

    def key(self) -> Hashable:
        """Of what is launched for it."""
        plan = self.plan
        sizes = (self.start, self.end, self.num_keys, plan.num_tiles, plan.key_begin, plan.needs_state)
        return (*sizes, *_place(plan.tensor), *_place(self.block_tables), *_place(self.k_starts))


@dataclass(frozen=True, slots=True)
class RecomputedRows:
    """Rows [start, end) in the decode form: generated tokens of a history that is computed again."""

    start: int
    end: int
    kv_lens: torch.Tensor  # int32 [rows]
    block_tables: torch.Tensor  # int32 [rows, n]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of a step's chunks; they follow the rows that decode. Row numbers count from the step's first row."""

    token_ids: torch.Tensor  # int32 [num_rows]
    positions: torch.Tensor  # int64 [num_rows]
    slot_mapping: torch.Tensor  # int64 [num_rows]
    prefill: Sequence[PrefillGroup]
    recomputed: Sequence[RecomputedRows]

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def key(self) -> Hashable:
        """Equal for steps whose layers' launches are equal: the same sizes, and tensors in the same places."""
        return (
            self.num_rows,
            tuple(group.key() for group in self.prefill),
            tuple((r.start, r.end, *_place(r.kv_lens), *_place(r.block_tables)) for r in self.recomputed),
        )


class GpuModel:
    """Owns the step's buffers, made once; launches kernels on the current stream, allocates and waits for nothing.

    Rows [0, num_decode) of a step decode: their embedding, positions, slots, lengths and tables are in the buffers
    already (`step_prepare`). The chunks' rows follow.
    """

    def __init__(
        self,
        weights: GpuWeights,
        *,
        max_decode_rows: int,
        max_rows: int,
        max_keys: int,
        max_blocks: int,
        deterministic: bool,
    ) -> None:
        """`max_rows`: decode rows and chunk rows together; `max_keys`: latents expanded at a time by the prefill form, a
        multiple of 128 where a sequence may have more; `max_blocks`: of one sequence."""
        config = weights.config
        device = weights.embedding.device
        self.weights = weights
        self.config = config
        self.device = device
        self.deterministic = deterministic
        self.max_keys = max_keys
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.heads = heads

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        qkv_width = max(layer.attention.qkv_a.shape[0] for layer in weights.layers)
        self.x = empty(max_rows, hidden)
        self.normed = empty(max_rows, hidden)
        self.qkv = empty(max_rows, qkv_width)
        lora = config.q_lora_rank
        self.q_lora = None if lora is None else empty(max_rows, lora)
        self.q = None if lora is None else empty(max_rows, heads * QK)
        self.attended = empty(max_rows, heads * VALUE)
        self.projected = empty(max_rows, hidden)
        # Rows of the last layer whose choice is wanted.
        self.last_x = empty(max_decode_rows, hidden)
        self.last_attended = empty(max_decode_rows, heads * VALUE)
        self.last_normed = empty(max_decode_rows, hidden)
        self.positions = empty(max_rows, dtype=torch.int64).zero_()
        self.slot_mapping = empty(max_rows, dtype=torch.int64).fill_(-1)
        # Of the decode form.
        self.q_latent = empty(max_decode_rows, heads, LATENT)
        self.o_latent = empty(max_decode_rows, heads, LATENT)
        self.kv_lens = empty(max_decode_rows, dtype=torch.int32).zero_()
        self.row_tables = empty(max_decode_rows, max_blocks, dtype=torch.int32).zero_()
        self.q_starts = torch.arange(max_decode_rows + 1, dtype=torch.int32, device=device)
        max_kv_len = max_blocks * 64
        self.decode_workspace = make_workspace(
            device,
            max_batch=max_decode_rows,
            num_heads=heads,
            deterministic=deterministic,
            max_kv_len=max_kv_len if deterministic else None,
        )
        # Of the prefill form.
        self.latents = empty(max_rows, LATENT + ROPE)
        self.gathered = empty(max_keys, LATENT + ROPE)
        self.kv = empty(max_keys, heads, NOPE + VALUE)
        num_carried = max_rows if (max_blocks - 1) * 64 >= max_keys else 0  # from one slab of keys to the next
        self.slab_state = empty(num_carried, heads, STATE_WIDTH, dtype=torch.float32)
        # Of the feed-forward part.
        downs = [mlp.down if isinstance(mlp, GpuDense) else mlp.shared_down for mlp in (x.mlp for x in weights.layers)]
        self.gated = empty(max_rows * max((down.shape[1] for down in downs if down is not None), default=0))
        moe = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, GpuMoe)]
        if moe:
            self.router_logits = empty(max_rows, config.n_routed_experts, dtype=torch.float32)
            self.topk_ids = empty(max_rows, config.num_experts_per_tok, dtype=torch.int32)
            self.topk_weights = empty(max_rows, config.num_experts_per_tok, dtype=torch.float32)
            self.experts_workspace = make_experts_workspace(
                max_rows,
                config.num_experts_per_tok,
                config.n_routed_experts,
                hidden,
                config.moe_intermediate_size,
                device,
            )
        self.linear_workspace = make_linear_workspace(device)
        self.fence = empty(1)
        self._library = load() if device.type == "cuda" else None
        self._side = _SideStream(device) if device.type == "cuda" else None
        self._launches: LayerLaunches | None = None  # being recorded
        self._recorded: dict[Hashable, list[tuple[LayerProgram, int, int]]] = {}  # of steps with chunks, by their sizes
        self._own: tuple[Sequence[torch.Tensor], OwnTensors] | None = None  # with the caches that it is of
        self._runs = _runs_of_a_kind([type(layer.mlp) for layer in weights.layers])

    def _own_tensors(self, caches: Sequence[torch.Tensor]) -> OwnTensors:
        """What layers have to themselves: weights, cache, and the norm that follows."""
        if self._own is None or self._own[0] is not caches:
            layers: list[Pointers] = []
            for i, (layer, cache) in enumerate(zip(self.weights.layers, caches, strict=True)):
                own: list[torch.Tensor | None] = [cache, layer.post_attention_norm, self._next_norm(i)]
                for part in (layer.attention, layer.mlp):
                    values = (getattr(part, field.name) for field in dataclasses.fields(part))
                    own += [value for value in values if value is None or isinstance(value, torch.Tensor)]
                layers.append(own)
            self._own = caches, OwnTensors(layers)
            self._recorded.clear()
        return self._own[1]

    def _next_norm(self, layer_idx: int) -> torch.Tensor:
        layers = self.weights.layers
        return layers[layer_idx + 1].input_norm if layer_idx + 1 < len(layers) else self.weights.norm

    def forward(
        self,
        num_decode: int,
        chunks: ChunkRows | None,
        layer_caches: Sequence[torch.Tensor],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All layers for the step's rows, whose embeddings are in `x`; returns final normed rows, [rows, hidden].

        layer_caches: a layer's cache each, [num_blocks, 64, 576] bf16. wanted: int32 [n], at most as many as may decode,
        with chunks alone: the rows that are returned, and all that the last layer computes after its attention.
        """
        num_rows = num_decode + (chunks.num_rows if chunks is not None else 0)
        if chunks is not None:
            self.positions[num_decode:num_rows].copy_(chunks.positions)
            self.slot_mapping[num_decode:num_rows].copy_(chunks.slot_mapping)
        if num_decode:
            plan_decode(self.decode_workspace, self.kv_lens[:num_decode], self.q_starts[: num_decode + 1])
        normed = self.normed[:num_rows]
        rms_norm(self.x[:num_rows], self.weights.layers[0].input_norm, self.config.rms_norm_eps, out=normed)
        if self._library is None:
            last = len(layer_caches) - 1
            for i, cache in enumerate(layer_caches):
                self._attention(i, num_decode, num_rows, chunks, cache)
                if wanted is None or i < last:
                    self._rest(i, num_rows, is_decode=chunks is None)
                else:
                    self._rest_of_wanted(i, num_rows, wanted)
        elif chunks is None:
            self._record(self._library, num_decode, num_rows, None, layer_caches, None)
        else:
            # (cuBLAS's handle gets the current stream here.)
            stream, handle = current_stream(self.device), blas_handle(self.device)
            self._own_tensors(layer_caches)  # forgets what is of other caches
            key = (stream, handle, num_decode, chunks.key(), _place(wanted))
            programs = self._recorded.pop(key, None)
            if programs is None:
                programs = self._record(self._library, num_decode, num_rows, chunks, layer_caches, wanted)
            else:
                for program, start, end in programs:
                    program.run(start, end)
            self._recorded[key] = programs
            if len(self._recorded) > MAX_RECORDED:
                del self._recorded[next(iter(self._recorded))]  # the one not used for the longest time
        return normed if wanted is None else self.last_normed[: wanted.shape[0]]

    def _record(
        self,
        library: KernelLibrary,
        num_decode: int,
        num_rows: int,
        chunks: ChunkRows | None,
        layer_caches: Sequence[torch.Tensor],
        wanted: torch.Tensor | None,
    ) -> list[tuple[LayerProgram, int, int]]:
        """Launch all layers. Returns what does the same again: a program for each run of layers [start, end)."""
        own = self._own_tensors(layer_caches)
        last = len(layer_caches) - 1
        programs: list[tuple[LayerProgram, int, int]] = []
        attention: LayerLaunches | None = None  # layers of all kinds have the same

        def attend(layer_idx: int) -> LayerLaunches:
            nonlocal attention
            if attention is None:
                attention = self._launches = LayerLaunches(library, own, layer_idx)
                self._attention(layer_idx, num_decode, num_rows, chunks, layer_caches[layer_idx])
            else:
                LayerProgram(library, own, [attention]).run(layer_idx, layer_idx + 1)
            return attention

        of_kind: dict[type, LayerProgram] = {}
        for kind, first, stop in self._runs:
            start, end = first, stop if wanted is None else min(stop, last)
            if start < end and kind not in of_kind:
                attended = attend(start)
                rest = self._launches = LayerLaunches(library, own, start)
                self._rest(start, num_rows, is_decode=chunks is None)
                of_kind[kind] = LayerProgram(library, own, [attended, rest])
                start += 1
            if start < end:
                of_kind[kind].run(start, end)
            if first < end:
                programs.append((of_kind[kind], first, end))
        if wanted is not None:
            attended = attend(last)
            rest = self._launches = LayerLaunches(library, own, last)
            self._rest_of_wanted(last, num_rows, wanted)
            programs.append((LayerProgram(library, own, [attended, rest]), last, last + 1))
        self._launches = None
        return programs

    # What follows is recorded: nothing in it may depend on the layer but through the tensors of `_own_tensors`.

    def _rest(self, layer_idx: int, num_rows: int, *, is_decode: bool) -> None:
        """A layer after its attention: x += what attention and the feed-forward part add; normed = x behind the next norm."""
        x, normed = self.x[:num_rows], self.normed[:num_rows]
        self._project(layer_idx, self.attended[:num_rows], x, normed)
        self._feed_forward(layer_idx, x, normed, is_decode=is_decode)

    def _rest_of_wanted(self, layer_idx: int, num_rows: int, wanted: torch.Tensor) -> None:
        """The same of some rows, which are gathered first."""
        n = wanted.shape[0]
        if n == 0:
            return
        x, attended, normed = self.last_x[:n], self.last_attended[:n], self.last_normed[:n]
        embed(wanted, self.x[:num_rows], x, library=self._launches)
        embed(wanted, self.attended[:num_rows], attended, library=self._launches)
        self._project(layer_idx, attended, x, normed)
        self._feed_forward(layer_idx, x, normed, is_decode=False)

    def _project(self, layer_idx: int, attended: torch.Tensor, x: torch.Tensor, normed: torch.Tensor) -> None:
        """x += attention's output; normed = x behind the feed-forward part's norm."""
        layer = self.weights.layers[layer_idx]
        projected = self.projected[: x.shape[0]]
        self._linear(attended, layer.attention.o, out=projected, bias=layer.attention.o_bias)
        rms_norm(
            projected,
            layer.post_attention_norm,
            self.config.rms_norm_eps,
            residual=x,
            out=normed,
            library=self._launches,
        )

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """out = hidden times the head: hidden [n, hidden] bf16, out float32 [n, vocab]."""
        self._linear(hidden, self.weights.head, out=out)

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        tiling: Tiling | None = None,
    ) -> torch.Tensor:
        """out = x times weight, + bias, + residual (which is out)."""
        assert residual is None or residual is out  # otherwise it is copied there first, by what is not recorded
        launches = self._launches
        before = launches.num_launches if launches is not None else 0
        linear(
            x,
            weight,
            out=out,
            out_dtype=out.dtype,
            bias=bias,
            residual=residual,
            deterministic=self.deterministic,
            workspace=self.linear_workspace,
            tiling=tiling,
            library=launches,
        )
        if launches is not None and launches.num_launches == before:  # it was cuBLAS's
            index, bias_index = launches.index_of(weight), None if bias is None else launches.index_of(bias)

            def again(own: Pointers) -> None:
                layer_weight, layer_bias = own[index], None if bias_index is None else own[bias_index]
                assert layer_weight is not None
                linear(x, layer_weight, out=out, out_dtype=out.dtype, bias=layer_bias, residual=residual)

            launches.record(again)
        return out

    def _attention(
        self, layer_idx: int, num_decode: int, num_rows: int, chunks: ChunkRows | None, cache: torch.Tensor
    ) -> None:
        """Attention of all rows, from normed rows to `attended`, before its output projection."""
        weights = self.weights.layers[layer_idx].attention
        qkv = self._linear(self.normed[:num_rows], weights.qkv_a, out=self.qkv[:num_rows], bias=weights.qkv_a_bias)
        q = qkv[:, : weights.q_width]
        if weights.q_b is not None:
            assert weights.q_norm is not None
            assert self.q_lora is not None
            assert self.q is not None
            q = rms_norm(q, weights.q_norm, LATENT_NORM_EPS, out=self.q_lora[:num_rows], library=self._launches)
            q = self._linear(q, weights.q_b, out=self.q[:num_rows])
        heads = _per_head(q, self.heads)
        attended = self.attended[:num_rows]
        mla_store(
            cache,
            qkv[:, weights.q_width : weights.q_width + LATENT],
            qkv[:, weights.q_width + LATENT :],
            q_pe=heads[..., NOPE:],
            positions=self.positions[:num_rows],
            slot_mapping=self.slot_mapping[:num_rows],
            cos_sin=self.weights.cos_sin,
            norm_weight=weights.kv_norm,
            eps=LATENT_NORM_EPS,
            latent_out=self.latents[:num_rows] if chunks is not None else None,
            library=self._launches,
        )
        if num_decode:
            self._attend_latents(
                weights,
                heads[:num_decode],
                cache,
                self.row_tables[:num_decode],
                self.kv_lens[:num_decode],
                attended[:num_decode],
            )
        if chunks is not None:
            for group in chunks.prefill:
                self._attend_expanded(weights, heads[group.start : group.end], group, cache, attended)
            for rows in chunks.recomputed:
                # (Planned for each layer: these rows are rare, and the workspace is the decode rows'.)
                plan_decode(
                    self.decode_workspace,
                    rows.kv_lens,
                    self.q_starts[: rows.end - rows.start + 1],
                    library=self._launches,
                )
                self._fence()
                self._attend_latents(
                    weights,
                    heads[rows.start : rows.end],
                    cache,
                    rows.block_tables,
                    rows.kv_lens,
                    attended[rows.start : rows.end],
                )
            if chunks.recomputed and num_decode:
                plan_decode(
                    self.decode_workspace,
                    self.kv_lens[:num_decode],
                    self.q_starts[: num_decode + 1],
                    library=self._launches,
                )

    def _fence(self) -> None:
        """What was launched before ends before anything launched after it begins.

        Our kernels may begin early, and attention reads its plan before it waits for the kernel ahead of it. In a step
        of decode rows `mla_store` stands between the two, which lets others begin only after its own wait.
        """
        self._zero_fence()
        if self._launches is not None:
            self._launches.record(lambda own: self._zero_fence())

    def _zero_fence(self) -> None:
        self.fence.zero_()

    def _attend_latents(
        self,
        weights: GpuAttention,
        heads: torch.Tensor,
        cache: torch.Tensor,
        block_tables: torch.Tensor,
        kv_lens: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """The absorbed form, a sequence a row. heads: [rows, heads, 192], turned; attended: [rows, heads * 128]."""
        num_rows = heads.shape[0]
        q_latent, o_latent = self.q_latent[:num_rows], self.o_latent[:num_rows]
        absorb_q(heads[..., :NOPE], weights.w_uk, q_latent, deterministic=self.deterministic, library=self._launches)
        mla_decode(
            q_latent,
            heads[..., NOPE:],
            cache,
            block_tables=block_tables,
            kv_lens=kv_lens,
            q_starts=self.q_starts[: num_rows + 1],
            workspace=self.decode_workspace,
            softmax_scale=self.config.softmax_scale,
            out=o_latent,
            library=self._launches,
        )
        absorb_v(o_latent, weights.w_uv, attended, deterministic=self.deterministic, library=self._launches)

    def _attend_expanded(
        self,
        weights: GpuAttention,
        heads: torch.Tensor,
        group: PrefillGroup,
        cache: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """The expanded form over whole segments. heads: [rows, heads, 192], turned."""
        if group.block_tables is None or group.k_starts is None:
            latents = self.latents[group.start : group.end]
        else:
            latents = self.gathered[: group.num_keys]
            gather_latents(
                cache,
                group.block_tables,
                group.k_starts,
                latents,
                key_begin=group.plan.key_begin,
                library=self._launches,
            )
        kv = self.kv[: group.num_keys]
        self._linear(latents[:, :LATENT], weights.kv_b, out=kv.flatten(1))
        mla_prefill(
            heads,
            kv,
            latents[:, LATENT:],
            _per_head(attended[group.start : group.end], self.heads),
            group.plan,
            scale=self.config.softmax_scale,
            state=self.slab_state[group.start : group.end] if group.plan.needs_state else None,
            library=self._launches,
        )

    def _feed_forward(self, layer_idx: int, x: torch.Tensor, normed: torch.Tensor, *, is_decode: bool) -> None:
        """x += the feed-forward part; normed = x behind the next layer's norm. Both [rows, hidden]."""
        config, mlp, next_norm = self.config, self.weights.layers[layer_idx].mlp, self._next_norm(layer_idx)
        num_rows = x.shape[0]
        if isinstance(mlp, GpuDense):
            self._gated_mlp(normed, mlp.gate_up, mlp.down, x)
            rms_norm(x, next_norm, config.rms_norm_eps, out=normed, library=self._launches)
            return
        beside = self._side if is_decode and num_rows <= BESIDE_ROWS else None
        if mlp.shared_gate_up is None or mlp.shared_down is None:
            beside = None
        elif beside is None or self._launches is None:
            self._gated_mlp(normed, mlp.shared_gate_up, mlp.shared_down, x)
        else:
            with beside.launched(self._launches):
                # (Not by cuBLAS: torch's handle has one stream.)
                tiling = choose_tiling(num_rows, *mlp.shared_down.shape, deterministic=self.deterministic)
                self._gated_mlp(normed, mlp.shared_gate_up, mlp.shared_down, x, tiling)
        logits = self.router_logits[:num_rows]
        if mlp.router.dtype == torch.bfloat16:
            self._linear(normed, mlp.router, out=logits)
        else:
            self._float32_router(normed, mlp.router, logits)
        topk_ids, topk_weights = route(
            logits,
            mlp.router_bias,
            top_k=config.num_experts_per_tok,
            scoring_func=config.scoring_func,
            topk_method=config.topk_method,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            scale_normed=config.model_type == "deepseek_v3",
            routed_scaling_factor=config.routed_scaling_factor,
            out=(self.topk_ids[:num_rows], self.topk_weights[:num_rows]),
            library=self._launches,
        )
        moe_experts(
            normed,
            topk_ids,
            mlp.gate_up,
            mlp.down,
            self.experts_workspace,
            deterministic=self.deterministic,
            library=self._launches,
        )
        if beside is not None and self._launches is not None:
            beside.join(self._launches)
        moe_combine(
            self.experts_workspace,
            topk_weights,
            x,
            norm_weight=next_norm,
            eps=config.rms_norm_eps,
            normed_out=normed,
            library=self._launches,
        )

    def _gated_mlp(
        self,
        normed: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        x: torch.Tensor,
        tiling: Tiling | None = None,
    ) -> None:
        """x += down(silu(gate(normed)) * up(normed)). `tiling`: of the second product."""
        num_rows, width = normed.shape[0], down.shape[1]
        gated = self.gated[: num_rows * width].view(num_rows, width)
        linear_silu_mul(
            normed,
            gate_up,
            out=gated,
            deterministic=self.deterministic,
            workspace=self.linear_workspace,
            library=self._launches,
        )
        self._linear(gated, down, out=x, residual=x, tiling=tiling)

    def _float32_router(self, normed: torch.Tensor, router: torch.Tensor, logits: torch.Tensor) -> None:
        """For routers that BF16 cannot hold."""
        torch.mm(normed.float(), router.t(), out=logits)
        if self._launches is not None:
            index = self._launches.index_of(router)

            def again(own: Pointers) -> None:
                layer_router = own[index]
                assert layer_router is not None
                torch.mm(normed.float(), layer_router.t(), out=logits)

            self._launches.record(again)


class _SideStream:
    """A second stream, for launches that need not wait for those before them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        for event in self._events:
            event.record()  # (It is made when it is first recorded.)

    @contextmanager
    def launched(self, launches: LayerLaunches) -> Iterator[None]:
        """What is launched inside waits for what was launched so far, and for nothing later."""
        main = current_stream(self._device)
        args = StreamWaitArgs(event=self._events[0].cuda_event, other=self._stream.cuda_stream)
        launches.call("rorqual_stream_wait", args, main)
        with torch.cuda.stream(self._stream):
            yield

    def join(self, launches: LayerLaunches) -> None:
        """What is launched from here on waits for what was launched beside."""
        args = StreamWaitArgs(event=self._events[1].cuda_event, other=current_stream(self._device))
        launches.call("rorqual_stream_wait", args, self._stream.cuda_stream)


def _runs_of_a_kind(kinds: Sequence[type]) -> list[tuple[type, int, int]]:
    """Runs [start, end) of equal neighbours."""
    edges = [i for i in range(len(kinds) + 1) if i in (0, len(kinds)) or kinds[i] is not kinds[i - 1]]
    return [(kinds[start], start, end) for start, end in pairwise(edges)]


def _place(tensor: torch.Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else (tensor.data_ptr(), *tensor.shape, *tensor.stride())


def _per_head(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[rows, heads * width], rows strided or not, as [rows, heads, width]."""
    return x.as_strided(
        (x.shape[0], num_heads, x.shape[1] // num_heads), (x.stride(0), x.shape[1] // num_heads, 1), x.storage_offset()
    )
