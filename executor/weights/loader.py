"""From named tensors to a model: stacking, fusing, reordering."""

from __future__ import annotations

from pathlib import Path

import torch

from ..model.deepseek import DeepseekModel, ModelParts
from ..model.layer import DecoderLayer
from ..model.linear import Linear, require_equal_rows
from ..model.mla import MlaAttention, MlaWeights, Scratch
from ..model.moe import DenseMlp, MoeMlp, MoeWeights
from ..model.mtp import MtpLayer
from ..model.norm import RmsNorm
from ..model.rope import Rope
from .rotary import as_pairs
from .source import Progress, TensorSource, open_source

MAX_PACKED_BYTES = 2 << 30
"""Above this, weights are kept once only: a prepacked copy beside the plain one would double the memory."""


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    deterministic: bool = False,
    progress: Progress | None = None,
) -> DeepseekModel:
    """The model of the checkpoint folder `path`, computing in `dtype` on `device`.

    Everything that can be wrong with a checkpoint is found before its weights are read. Raises CheckpointError, naming
    file, tensor and cure; ConfigError if `deterministic` cannot be kept on this machine.
    """
    with open_source(path, dtype=dtype, device=torch.device(device), progress=progress) as source:
        return build_model(source, deterministic=deterministic)


def build_model(source: TensorSource, *, deterministic: bool = False) -> DeepseekModel:
    """The model of the source's tensors, in its dtype, on its device. Raises as the source does; ConfigError if
    `deterministic` cannot be kept on this machine."""
    parts = _Builder(source, deterministic).build()
    return DeepseekModel(source.config, parts, dtype=source.dtype, device=source.device, deterministic=deterministic)


class _Builder:
    def __init__(self, source: TensorSource, deterministic: bool) -> None:
        config, dtype, device = source.config, source.dtype, source.device
        self.source = source
        self.config = config
        self.deterministic = deterministic
        self.pack = device.type == "cpu" and source.num_elements * dtype.itemsize <= MAX_PACKED_BYTES
        self.rope = Rope(config.rope, config.qk_rope_head_dim, device, deterministic=deterministic)
        self.scratch = Scratch(config.latent_dim, dtype, device)

    def build(self) -> ModelParts:
        config = self.config
        embedding = self.tensor("model.embed_tokens.weight")
        layers = [self.layer(i) for i in range(config.num_hidden_layers)]
        norm = self.norm("model.norm.weight")
        name = "lm_head.weight" if "lm_head.weight" in self.source else "model.embed_tokens.weight"
        head = self.head(name)
        mtp = [self.mtp(depth, embedding, head) for depth in range(config.num_mtp_layers)]
        if self.deterministic:
            require_equal_rows(self.source.dtype, self.source.device, self.pack)
        return ModelParts(embedding, layers, norm, head, mtp, self.rope)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.source.tensor(name, dtype)

    def optional(self, name: str) -> torch.Tensor | None:
        return self.tensor(name) if name in self.source else None

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.tensor(name), self.config.rms_norm_eps)

    def linear(self, weight: torch.Tensor) -> Linear:
        return Linear(weight, deterministic=self.deterministic, pack=self.pack)

    def head(self, name: str) -> Linear:
        """The head in float32 whatever the compute dtype: its product is the logits, which are never rounded."""
        return self.linear(self.tensor(name, torch.float32))

    def layer(self, layer_idx: int) -> DecoderLayer:
        prefix = f"model.layers.{layer_idx}."
        return DecoderLayer(
            input_norm=self.norm(prefix + "input_layernorm.weight"),
            attention=self.attention(prefix + "self_attn."),
            post_attention_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            mlp=self.moe(prefix + "mlp.") if self.config.is_moe_layer(layer_idx) else self.dense(prefix + "mlp."),
        )

    def attention(self, prefix: str) -> MlaAttention:
        config = self.config
        q_proj, q_b_proj = self.optional(prefix + "q_proj.weight"), self.optional(prefix + "q_b_proj.weight")
        kv_a_proj = self.tensor(prefix + "kv_a_proj_with_mqa.weight")
        kv_a_bias = self.optional(prefix + "kv_a_proj_with_mqa.bias")
        if not config.rope_interleave:  # the rows of a half-and-half rotary part, as pairs
            q_proj = None if q_proj is None else as_pairs(q_proj, config.num_attention_heads, config.qk_rope_head_dim)
            q_b_proj = (
                None if q_b_proj is None else as_pairs(q_b_proj, config.num_attention_heads, config.qk_rope_head_dim)
            )
            kv_a_proj = as_pairs(kv_a_proj, 1, config.qk_rope_head_dim)
            kv_a_bias = None if kv_a_bias is None else as_pairs(kv_a_bias, 1, config.qk_rope_head_dim)
        weights = MlaWeights(
            q_proj=q_proj,
            q_a_proj=self.optional(prefix + "q_a_proj.weight"),
            q_a_bias=self.optional(prefix + "q_a_proj.bias"),
            q_a_layernorm=self.optional(prefix + "q_a_layernorm.weight"),
            q_b_proj=q_b_proj,
            kv_a_proj=kv_a_proj,
            kv_a_bias=kv_a_bias,
            kv_a_layernorm=self.tensor(prefix + "kv_a_layernorm.weight"),
            kv_b_proj=self.tensor(prefix + "kv_b_proj.weight"),
            o_proj=self.tensor(prefix + "o_proj.weight"),
            o_bias=self.optional(prefix + "o_proj.bias"),
        )
        return MlaAttention(config, weights, self.rope, self.scratch, deterministic=self.deterministic, pack=self.pack)

    def dense(self, prefix: str) -> DenseMlp:
        gate, up, down = (self.tensor(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
        return DenseMlp(gate, up, down, deterministic=self.deterministic, pack=self.pack)

    def moe(self, prefix: str) -> MoeMlp:
        config = self.config
        stacks: dict[str, torch.Tensor] = {}
        for part in ("gate", "up", "down"):
            experts = [
                self.tensor(f"{prefix}experts.{expert}.{part}_proj.weight") for expert in range(config.n_routed_experts)
            ]
            if config.n_shared_experts:
                # An MLP of n times an expert's width is the sum of n MLPs of that width.
                shared = self.tensor(f"{prefix}shared_experts.{part}_proj.weight")
                experts.extend(shared.chunk(config.n_shared_experts, dim=1 if part == "down" else 0))
            stacks[part] = torch.stack(experts)
        bias = None
        if config.topk_method == "noaux_tc":
            bias = self.tensor(prefix + "gate.e_score_correction_bias", torch.float32)
        weights = MoeWeights(router=self.tensor(prefix + "gate.weight", torch.float32), router_bias=bias, **stacks)
        return MoeMlp(config, weights, deterministic=self.deterministic, pack=self.pack)

    def mtp(self, depth: int, embedding: torch.Tensor, head: Linear) -> MtpLayer:
        layer_idx = self.config.num_hidden_layers + depth
        prefix = f"model.layers.{layer_idx}."
        own_embedding = self.optional(prefix + "embed_tokens.weight")
        own_head = prefix + "shared_head.head.weight"
        return MtpLayer(
            enorm=self.norm(prefix + "enorm.weight"),
            hnorm=self.norm(prefix + "hnorm.weight"),
            eh_proj=self.linear(self.tensor(prefix + "eh_proj.weight")),
            layer=self.layer(layer_idx),
            norm=self.norm(prefix + "shared_head.norm.weight"),
            embedding=embedding if own_embedding is None else own_embedding,
            head=self.head(own_head) if own_head in self.source else head,
        )
