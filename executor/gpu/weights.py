"""A model's weights as the compiled kernels want them: fused, packed, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rorqual import kernels
from rorqual.kernels.experts import pack_down_into, pack_gate_up, pack_gate_up_into
from rorqual.kernels.linear import pack_gate_up as pack_dense_gate_up
from rorqual.kernels.linear import prepare_absorbed

from ..model.config import ModelConfig
from ..weights.rotary import as_pairs
from ..weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """One layer's attention weights, bf16. Shapes: [out, in]."""

    qkv_a: torch.Tensor  # [heads * 192 or q_lora, then 576; hidden]
    qkv_a_bias: torch.Tensor | None
    q_width: int
    q_norm: torch.Tensor | None  # [q_lora]
    q_b: torch.Tensor | None  # [heads * 192, q_lora]
    kv_norm: torch.Tensor  # [512]
    kv_b: torch.Tensor  # [heads * 256, 512]
    w_uk: torch.Tensor  # as `prepare_absorbed` lays it out
    w_uv: torch.Tensor
    o: torch.Tensor  # [hidden, heads * 128]
    o_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GpuDense:
    gate_up: torch.Tensor  # packed [2 * width, hidden]
    down: torch.Tensor  # [hidden, width]


@dataclass(frozen=True, slots=True)
class GpuMoe:
    """Routed experts, and the shared ones as one dense MLP: an MLP of n times an expert's width is the sum of n MLPs.

    (As experts of the grouped products that every token chooses, their tiles hold all tokens and the others' few: with the
    kernels' first form that cost 30 us a layer at 1 token, 128 at 16 and 69 at 256, on an H200 with V2-Lite's two. With
    their present form it would be 8 to 27 up to 512 tokens, about what the dense products take, and 154 at 2,048.)
    """

    router: torch.Tensor  # [routed, hidden], bf16; float32 where the checkpoint's does not fit in bf16
    router_bias: torch.Tensor | None  # float32 [routed]
    gate_up: torch.Tensor  # packed [routed, 2 * width, hidden]
    down: torch.Tensor  # packed [routed, hidden, width]
    shared_gate_up: torch.Tensor | None  # packed [2 * shared * width, hidden]
    shared_down: torch.Tensor | None  # [hidden, shared * width]


@dataclass(frozen=True, slots=True)
class GpuLayer:
    input_norm: torch.Tensor
    attention: GpuAttention
    post_attention_norm: torch.Tensor
    mlp: GpuDense | GpuMoe


@dataclass(frozen=True, slots=True)
class GpuWeights:
    config: ModelConfig
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[GpuLayer]
    norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]
    cos_sin: torch.Tensor  # float32 [max_positions, 64]: 32 cosines, 32 sines


def load_gpu_weights(source: TensorSource, max_positions: int) -> GpuWeights:
    """Every tensor of the main model from `source`, which is on the device in bf16. Raises as the source does."""
    return _Loader(source).load(max_positions)


class _Loader:
    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.config = source.config

    def load(self, max_positions: int) -> GpuWeights:
        config = self.config
        embedding = self.source.tensor("model.embed_tokens.weight")
        layers = [self.layer(i) for i in range(config.num_hidden_layers)]
        norm = self.source.tensor("model.norm.weight")
        head = self.source.tensor("lm_head.weight") if "lm_head.weight" in self.source else embedding
        return GpuWeights(config, embedding, layers, norm, head, self.cos_sin(max_positions))

    def layer(self, layer_idx: int) -> GpuLayer:
        prefix = f"model.layers.{layer_idx}."
        return GpuLayer(
            self.source.tensor(prefix + "input_layernorm.weight"),
            self.attention(prefix + "self_attn."),
            self.source.tensor(prefix + "post_attention_layernorm.weight"),
            self.moe(prefix + "mlp.") if self.config.is_moe_layer(layer_idx) else self.dense(prefix + "mlp."),
        )

    def optional(self, name: str) -> torch.Tensor | None:
        return self.source.tensor(name) if name in self.source else None

    def attention(self, prefix: str) -> GpuAttention:
        config = self.config
        q_in, q_b = self.optional(prefix + "q_proj.weight"), self.optional(prefix + "q_b_proj.weight")
        kv_a = self.source.tensor(prefix + "kv_a_proj_with_mqa.weight")
        kv_a_bias = self.optional(prefix + "kv_a_proj_with_mqa.bias")
        if not config.rope_interleave:
            q_in = None if q_in is None else as_pairs(q_in, config.num_attention_heads, config.qk_rope_head_dim)
            q_b = None if q_b is None else as_pairs(q_b, config.num_attention_heads, config.qk_rope_head_dim)
            kv_a = as_pairs(kv_a, 1, config.qk_rope_head_dim)
            kv_a_bias = None if kv_a_bias is None else as_pairs(kv_a_bias, 1, config.qk_rope_head_dim)
        q_bias = None
        if q_in is None:
            q_in = self.source.tensor(prefix + "q_a_proj.weight")
            q_bias = self.optional(prefix + "q_a_proj.bias")
        bias = None
        if kv_a_bias is not None:
            bias = torch.cat((q_in.new_zeros(q_in.shape[0]) if q_bias is None else q_bias, kv_a_bias))
        kv_b = self.source.tensor(prefix + "kv_b_proj.weight")
        w_uk, w_uv = prepare_absorbed(kv_b)
        return GpuAttention(
            qkv_a=torch.cat((q_in, kv_a)),
            qkv_a_bias=bias,
            q_width=q_in.shape[0],
            q_norm=self.optional(prefix + "q_a_layernorm.weight"),
            q_b=q_b,
            kv_norm=self.source.tensor(prefix + "kv_a_layernorm.weight"),
            kv_b=kv_b,
            w_uk=w_uk,
            w_uv=w_uv,
            o=self.source.tensor(prefix + "o_proj.weight"),
            o_bias=self.optional(prefix + "o_proj.bias"),
        )

    def dense(self, prefix: str) -> GpuDense:
        gate, up, down = (self.source.tensor(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
        return GpuDense(pack_dense_gate_up(gate, up), down)

    def moe(self, prefix: str) -> GpuMoe:
        config, source = self.config, self.source
        routed = config.n_routed_experts
        width, hidden = config.moe_intermediate_size, config.hidden_size
        empty = torch.empty((0, width, hidden), dtype=torch.bfloat16, device=source.device)
        packed_shape = pack_gate_up(empty, empty).shape[1:]
        gate_up = empty.new_empty((routed, *packed_shape))
        down = empty.new_empty((routed, hidden, width))
        for expert in range(routed):
            name = f"{prefix}experts.{expert}."
            pack_gate_up_into(
                gate_up[expert], source.tensor(name + "gate_proj.weight"), source.tensor(name + "up_proj.weight")
            )
            pack_down_into(down[expert], source.tensor(name + "down_proj.weight", out=down[expert]))
        shared = self.dense(prefix + "shared_experts.") if config.n_shared_experts else None
        router = source.tensor(prefix + "gate.weight", torch.float32)
        rounded = router.to(torch.bfloat16)
        bias = None
        if config.topk_method == "noaux_tc":
            bias = source.tensor(prefix + "gate.e_score_correction_bias", torch.float32)
        return GpuMoe(
            router=rounded if torch.equal(rounded.float(), router) else router,
            router_bias=bias,
            gate_up=gate_up,
            down=down,
            shared_gate_up=None if shared is None else shared.gate_up,
            shared_down=None if shared is None else shared.down,
        )

    def cos_sin(self, num_positions: int) -> torch.Tensor:
        config = self.config.rope
        inv_freq = kernels.rope_inv_freq(
            self.config.qk_rope_head_dim,
            config.theta,
            factor=config.factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            truncate=config.truncate,
        ).to(self.source.device)
        angles = torch.arange(num_positions, dtype=torch.float32, device=self.source.device)[:, None] * inv_freq
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * config.cos_sin_scale
