"""Multi-head latent attention (DeepSeek-V2 report, section 2.1), in its two forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .batch import BLOCK_SIZE
from .config import ModelConfig
from .linear import Linear
from .norm import RmsNorm
from .plan import DecodeGroup, PrefillSegment, StepPlan
from .rope import Rope

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]

LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says, as published


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """One layer's attention weights as published, in the compute dtype. Shapes: [out, in]."""

    q_proj: torch.Tensor | None  # [heads * 192, hidden], without q_lora
    q_a_proj: torch.Tensor | None  # [q_lora, hidden]
    q_a_bias: torch.Tensor | None
    q_a_layernorm: torch.Tensor | None  # [q_lora]
    q_b_proj: torch.Tensor | None  # [heads * 192, q_lora]
    kv_a_proj: torch.Tensor  # [512 + 64, hidden]
    kv_a_bias: torch.Tensor | None
    kv_a_layernorm: torch.Tensor  # [512]
    kv_b_proj: torch.Tensor  # [heads * (128 + 128), 512]
    o_proj: torch.Tensor  # [hidden, heads * 128]
    o_bias: torch.Tensor | None


class Scratch:
    """A buffer that decode attention gathers latents into, reused by every layer and step.

    A fresh tensor of some 30 MB is mapped and zeroed by the kernel at each use: 34 ms instead of 12 for 16 sequences
    of 1000 tokens.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(0, width, dtype=dtype, device=device)

    def rows(self, num_rows: int) -> torch.Tensor:
        if self.buffer.shape[0] < num_rows:
            self.buffer = self.buffer.new_empty(num_rows, self.buffer.shape[1])
        return self.buffer[:num_rows]


class MlaAttention:
    """One layer's attention: from the normed hidden state to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        weights: MlaWeights,
        rope: Rope,
        scratch: Scratch,
        *,
        deterministic: bool,
        pack: bool,
    ) -> None:
        self.num_heads = config.num_attention_heads
        self.nope, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.kv_lora = config.v_head_dim, config.kv_lora_rank
        self.scale = config.softmax_scale
        self.deterministic = deterministic
        self.rope = rope
        self.scratch = scratch

        def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            return Linear(weight, bias, deterministic=deterministic, pack=pack)

        # One product for everything that reads the hidden state.
        if weights.q_proj is not None:
            q_in, q_bias = weights.q_proj, None
            self.q_norm = None
            q_out: torch.Tensor | None = None
        else:
            assert weights.q_a_proj is not None
            assert weights.q_a_layernorm is not None
            assert weights.q_b_proj is not None
            q_in, q_bias = weights.q_a_proj, weights.q_a_bias
            self.q_norm = RmsNorm(weights.q_a_layernorm, LATENT_NORM_EPS)
            q_out = weights.q_b_proj
        bias = None
        if weights.kv_a_bias is not None:
            bias = torch.cat((q_in.new_zeros(q_in.shape[0]) if q_bias is None else q_bias, weights.kv_a_bias))
        self.q_width = q_in.shape[0]
        self.qkv_a = linear(torch.cat((q_in, weights.kv_a_proj)), bias)
        self.kv_norm = RmsNorm(weights.kv_a_layernorm, LATENT_NORM_EPS)
        # Its rows are cache positions, whole blocks of them, when tiles matter.
        self.kv_b = Linear(weights.kv_b_proj, deterministic=deterministic, pack=pack, tile=BLOCK_SIZE)
        self.o = linear(weights.o_proj, weights.o_bias)
        self.q_b = None if q_out is None else linear(q_out, None)

        kv_b = weights.kv_b_proj.view(self.num_heads, self.nope + self.v_dim, self.kv_lora)
        self.w_uk = kv_b[:, : self.nope].contiguous()  # [heads, 128, 512]
        self.w_uv = kv_b[:, self.nope :].transpose(1, 2).contiguous()  # [heads, 512, 128]
        self.absorbed_q = self._absorb_q(q_out, linear)
        self.absorbed_o = self._absorb_o(weights.o_proj, weights.o_bias, linear)

    def _absorb_q(self, q_b: torch.Tensor | None, linear: MakeLinear) -> Linear | None:
        """q_b and W_uk as one product, where that is no more arithmetic (a small q_lora) and nothing is rounded."""
        if q_b is None or q_b.dtype != torch.float32:
            return None
        q_lora = q_b.shape[1]
        merged = self.num_heads * (self.kv_lora + self.rope_dim) * q_lora
        apart = q_b.numel() + self.w_uk.numel()
        if merged > 1.5 * apart:
            return None
        heads = q_b.view(self.num_heads, self.nope + self.rope_dim, q_lora)
        q_nope, q_pe = heads[:, : self.nope], heads[:, self.nope :]
        absorbed = torch.bmm(self.w_uk.double().transpose(1, 2), q_nope.double()).float()
        weight = torch.cat((absorbed, q_pe), dim=1).reshape(-1, q_lora)
        return linear(weight, None)

    def _absorb_o(self, o: torch.Tensor, bias: torch.Tensor | None, linear: MakeLinear) -> Linear | None:
        """W_uv and o_proj as one product, on the same condition."""
        hidden = o.shape[0]
        merged = self.num_heads * self.kv_lora * hidden
        if o.dtype != torch.float32 or merged > 1.5 * (o.numel() + self.w_uv.numel()):
            return None
        per_head = o.double().view(hidden, self.num_heads, self.v_dim).transpose(0, 1)  # [heads, hidden, 128]
        absorbed = torch.bmm(per_head, self.w_uv.double().transpose(1, 2)).float()  # [heads, hidden, 512]
        return linear(absorbed.transpose(0, 1).reshape(hidden, -1), bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, plan: StepPlan, cache: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, hidden], normed; residual: [num_rows, hidden]; cache: [num_slots, 576], written at the rows'
        slots before anything is read. Returns residual + attention."""
        qkv = self.qkv_a(x)
        q = qkv[:, : self.q_width]
        if self.q_norm is not None:
            q = self.q_norm(q)
        c_kv = self.kv_norm(qkv[:, self.q_width : self.q_width + self.kv_lora])
        k_pe = self.rope.turn(qkv[:, self.q_width + self.kv_lora :], plan.angles)
        cache.index_copy_(0, plan.slots, torch.cat((c_kv, k_pe), dim=-1))
        if not plan.has_prefill and not plan.has_decode:
            return residual  # nothing but padding
        if not plan.has_prefill and plan.decode_rows is None:
            return self._decode(q, plan.angles, residual, plan, cache)
        if not plan.has_decode and plan.prefill_rows is None:
            return self._prefill(q, plan.angles, residual, plan, cache)
        out = residual.clone()  # padding rows pass through
        if plan.has_prefill:
            rows = _rows_or_all(plan.prefill_rows, out)
            out[rows] = self._prefill(q[rows], plan.angles[rows], residual[rows], plan, cache)
        if plan.has_decode:
            rows = _rows_or_all(plan.decode_rows, out)
            out[rows] = self._decode(q[rows], plan.angles[rows], residual[rows], plan, cache)
        return out

    # The absorbed form: one latent head, 576 wide for scores and 512 for values.

    def _decode(
        self, q: torch.Tensor, angles: torch.Tensor, residual: torch.Tensor, plan: StepPlan, cache: torch.Tensor
    ) -> torch.Tensor:
        query = self._absorbed_query(q, angles)  # [rows, heads, 576]
        parts = [self._attend_latents(query[g.start : g.end], g, cache) for g in plan.decode_groups]
        latent = parts[0] if len(parts) == 1 else torch.cat(parts)  # [rows, heads, 512]
        if self.absorbed_o is not None:
            return self.absorbed_o(latent.flatten(1), residual)
        return self.o(self._per_head(latent, self.w_uv).flatten(1), residual)

    def _absorbed_query(self, q: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        if self.absorbed_q is not None:
            query = self.absorbed_q(q).view(-1, self.num_heads, self.kv_lora + self.rope_dim)
            q_pe = query[..., self.kv_lora :]
            turned = self.rope.turn(q_pe, angles)
            if turned is not q_pe:
                q_pe.copy_(turned)
            return query
        heads = (q if self.q_b is None else self.q_b(q)).view(q.shape[0], self.num_heads, self.nope + self.rope_dim)
        q_nope = self._per_head(heads[..., : self.nope], self.w_uk)
        return torch.cat((q_nope, self.rope.turn(heads[..., self.nope :], angles)), dim=-1)

    def _per_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x: [rows, heads, a]; weight: [heads, a, b] -> [rows, heads, b]; in tiles of 16 rows if deterministic."""
        if not self.deterministic:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, 0, 0, -rows % 16)).transpose(0, 1).contiguous()
        tiles = [torch.bmm(padded[:, i : i + 16].contiguous(), weight) for i in range(0, rows, 16)]
        return torch.cat(tiles, dim=1)[:, :rows].transpose(0, 1)

    def _attend_latents(self, query: torch.Tensor, group: DecodeGroup, cache: torch.Tensor) -> torch.Tensor:
        """query: [rows, heads, 576] -> [rows, heads, 512]. The latents are key and value at once: the value's last
        64 columns are computed and dropped, which is cheaper than a copy of the first 512."""
        rows = query.shape[0]
        if group.slots is None:
            latents = cache[group.first_slot : group.first_slot + group.context]
        else:
            latents = self.scratch.rows(rows * group.context)
            torch.index_select(cache, 0, group.slots, out=latents)
        latents = latents.view(rows, 1, group.context, -1)
        out = F.scaled_dot_product_attention(
            query.unsqueeze(1), latents, latents, attn_mask=group.mask, scale=self.scale
        )
        return out[:, 0, :, : self.kv_lora]

    # The expanded form: heads of 192 for scores and 128 for values.

    def _prefill(
        self, q: torch.Tensor, angles: torch.Tensor, residual: torch.Tensor, plan: StepPlan, cache: torch.Tensor
    ) -> torch.Tensor:
        heads = (q if self.q_b is None else self.q_b(q)).view(q.shape[0], self.num_heads, self.nope + self.rope_dim)
        q_pe = heads[..., self.nope :]
        turned = self.rope.turn(q_pe, angles)
        if turned is not q_pe:
            q_pe.copy_(turned)
        attend = self._attend_in_tiles if self.deterministic else self._attend_segment
        parts = [attend(heads[s.start_row : s.start_row + s.num_rows], s, cache) for s in plan.prefill_segments]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o(out.flatten(1), residual)

    def _expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [n, 576] -> keys [heads, n, 192] and values [heads, n, 128]."""
        kv = self.kv_b(latents[:, : self.kv_lora].contiguous()).view(-1, self.num_heads, self.nope + self.v_dim)
        k_pe = latents[:, None, self.kv_lora :].expand(-1, self.num_heads, -1)
        k = torch.cat((kv[..., : self.nope], k_pe), dim=-1)
        return k.transpose(0, 1), kv[..., self.nope :].transpose(0, 1)

    def _attend_segment(self, q: torch.Tensor, segment: PrefillSegment, cache: torch.Tensor) -> torch.Tensor:
        """q: [rows, heads, 192] -> [rows, heads, 128]."""
        k, v = self._expand(cache.index_select(0, segment.slots))
        # torch's flash attention wants one width for all three: the value is padded to the key's.
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1])) if v.shape[-1] < k.shape[-1] else v
        mask = None
        if segment.start_position and segment.num_rows > 1:
            rows = torch.arange(segment.num_rows, device=q.device) + segment.start_position
            mask = torch.arange(k.shape[1], device=q.device)[None, :] <= rows[:, None]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=segment.start_position == 0,
            scale=self.scale,
        )
        return out[0, ..., : self.v_dim].transpose(0, 1)

    def _attend_in_tiles(self, q: torch.Tensor, segment: PrefillSegment, cache: torch.Tensor) -> torch.Tensor:
        """The same with shapes that are a function of the position only: queries in tiles of 64 positions, each over
        the keys up to its tile's end, in products of equal shape wherever the prompt was cut and wherever it ends.

        What lies past the prompt's end is zeros here and later tokens there; both have weight exp(-inf) = 0.
        """
        start, end = segment.start_position, segment.start_position + segment.num_rows
        if start % BLOCK_SIZE:
            raise ValueError(f"deterministic prefill starts at a multiple of {BLOCK_SIZE}, got position {start}")
        padded_end = end + -end % BLOCK_SIZE
        latents = F.pad(cache.index_select(0, segment.slots), (0, 0, 0, padded_end - end))
        k, v = self._expand(latents)
        q = F.pad(q, (0, 0, 0, 0, 0, padded_end - end)).transpose(0, 1)
        in_tile = torch.arange(BLOCK_SIZE, device=q.device)
        outs: list[torch.Tensor] = []
        for tile in range(start, padded_end, BLOCK_SIZE):
            keys = tile + BLOCK_SIZE
            tile_q = q[:, tile - start : keys - start].contiguous()
            scores = torch.bmm(tile_q, k[:, :keys].contiguous().transpose(1, 2)).float() * self.scale
            beyond = torch.arange(keys, device=q.device)[None, :] > (tile + in_tile)[:, None]
            weights = torch.softmax(scores.masked_fill_(beyond, float("-inf")), dim=-1).to(q.dtype)
            outs.append(torch.bmm(weights, v[:, :keys].contiguous()))
        return torch.cat(outs, dim=1)[:, : segment.num_rows].transpose(0, 1)


def _rows_or_all(rows: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.shape[0], device=like.device) if rows is None else rows
