"""The architecture of a checkpoint: what config.json says, checked, under one set of names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rorqual.core.errors import CheckpointError

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
MAX_EXPERTS = 1_000_000  # in all layers; DeepSeek-V3 has 15,000
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: plain, or YaRN (arXiv 2309.00071) with DeepSeek's mscale."""

    rope_type: str  # "default" | "yarn"
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def cos_sin_scale(self) -> float:
        """The factor on cos and sin: mscale(mscale) / mscale(mscale_all_dim), 1 for published models."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_scale_factor(self) -> float:
        """The factor on 1 / sqrt(head width): mscale(mscale_all_dim) squared."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        mscale = yarn_mscale(self.factor, self.mscale_all_dim)
        return mscale * mscale


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 (YaRN, section 3.4, with DeepSeek's weight on the logarithm)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A checkpoint's shapes and rules. Sizes are numbers of elements; names are the published ones."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int  # 0: every layer is dense
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    moe_layer_freq: int
    scoring_func: str  # "softmax" | "sigmoid"
    topk_method: str  # "greedy" | "group_limited_greedy" | "noaux_tc"
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    rope_interleave: bool  # rotary pairs lie side by side (as published), not in two halves
    attention_bias: bool
    tie_word_embeddings: bool
    num_mtp_layers: int  # as configured; load_model lowers it to 0 if the checkpoint holds none
    checkpoint_dtype: torch.dtype
    fp8_block_size: tuple[int, int] | None  # set if linear weights are FP8 with block scales

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values a token a layer in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return float(self.qk_head_dim**-0.5) * self.rope.softmax_scale_factor

    def is_moe_layer(self, layer_idx: int) -> bool:
        return (
            self.n_routed_experts > 0
            and layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """A ModelConfig from config.json's object. Takes the published spellings (`rope_scaling`,
    `rope_theta`, `torch_dtype`) and transformers' own (`rope_parameters`, `dtype`).

    Raises CheckpointError, naming `source` and the key, for an architecture, rope, routing or
    quantisation that is not implemented, or a value that is missing or impossible.
    """
    reader = _Reader(raw, source)
    model_type = reader.string("model_type", "")
    architectures = reader.array("architectures")
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"{source}: model_type {model_type!r} (architectures {architectures}) is not supported; "
            f"supported are {', '.join(f'{k} ({v})' for k, v in ARCHITECTURES.items())}. "
            "Serve a DeepSeek-V2, V2-Lite, V3 or R1 checkpoint."
        )
    if architectures and ARCHITECTURES[model_type] not in architectures:
        raise CheckpointError(
            f"{source}: architectures {architectures} do not fit model_type {model_type!r}, which is served "
            f"as {ARCHITECTURES[model_type]}; correct one of the two."
        )
    is_v3 = model_type == "deepseek_v3"
    scoring_func = reader.string("scoring_func", "sigmoid" if is_v3 else "softmax")
    topk_method = reader.string("topk_method", "noaux_tc" if is_v3 else "greedy")
    if (scoring_func, topk_method) not in {
        ("softmax", "greedy"),
        ("softmax", "group_limited_greedy"),
        ("sigmoid", "noaux_tc"),
    }:
        raise CheckpointError(
            f"{source}: routing scoring_func={scoring_func!r} with topk_method={topk_method!r} is not supported; "
            "supported are softmax with greedy or group_limited_greedy, and sigmoid with noaux_tc."
        )
    hidden_act = reader.string("hidden_act", "silu")
    if hidden_act != "silu":
        raise CheckpointError(f"{source}: hidden_act {hidden_act!r} is not supported, only 'silu' is.")
    if reader.boolean("mlp_bias", False):
        raise CheckpointError(f"{source}: mlp_bias is not supported; published DeepSeek models have none.")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.optional_integer("num_key_value_heads")
    if num_kv_heads is not None and num_kv_heads != num_heads:
        raise CheckpointError(
            f"{source}: num_key_value_heads {num_kv_heads} differs from num_attention_heads {num_heads}; "
            "MLA has one key and value head a query head."
        )
    n_routed = reader.optional_integer("n_routed_experts") or 0
    if n_routed == 0:
        n_routed = reader.optional_integer("num_local_experts") or reader.optional_integer("num_experts") or 0
    grouped = topk_method != "greedy"
    config = ModelConfig(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        moe_intermediate_size=reader.optional_integer("moe_intermediate_size") or 0,
        num_hidden_layers=reader.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        q_lora_rank=reader.optional_integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
        n_routed_experts=n_routed,
        n_shared_experts=reader.optional_integer("n_shared_experts") or 0,
        num_experts_per_tok=reader.optional_integer("num_experts_per_tok") or 0,
        first_k_dense_replace=reader.optional_integer("first_k_dense_replace") or 0,
        moe_layer_freq=reader.optional_integer("moe_layer_freq") or 1,
        scoring_func=scoring_func,
        topk_method=topk_method,
        n_group=(reader.optional_integer("n_group") or 1) if grouped else 1,
        topk_group=(reader.optional_integer("topk_group") or 1) if grouped else 1,
        norm_topk_prob=reader.boolean("norm_topk_prob", is_v3),
        routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        rope=_parse_rope(raw, source),
        rope_interleave=reader.boolean("rope_interleave", True),
        attention_bias=reader.boolean("attention_bias", False),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        num_mtp_layers=reader.optional_integer("num_nextn_predict_layers")
        or reader.optional_integer("num_mtp_layers")
        or 0,
        checkpoint_dtype=_parse_dtype(raw, source),
        fp8_block_size=_parse_quantization(raw, source),
    )
    _check(config, source)
    return config


def load_config(path: str | Path) -> ModelConfig:
    """The configuration of the checkpoint folder `path`. Raises CheckpointError if it cannot be served."""
    file = Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: no such file; a checkpoint is a folder with config.json and *.safetensors."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error}); download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: holds {type(raw).__name__}, not an object; download it again.")
    return parse_config(raw, str(file))


class _Reader:
    """Typed access to config.json that names file and key when a value does not fit."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def _fail(self, key: str, wanted: str) -> CheckpointError:
        found = f"is {self.raw[key]!r}" if key in self.raw else "is missing"
        return CheckpointError(f"{self.source}: {key} {found}; {wanted} is needed.")

    def integer(self, key: str) -> int:
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._fail(key, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._fail(key, "a non-negative integer or null")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._fail(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._fail(key, "true or false")
        return value

    def array(self, key: str) -> list[Any]:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, list):
            raise self._fail(key, "a list")
        return value or []

    def object(self, key: str) -> dict[str, Any]:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._fail(key, "an object")
        return value or {}

    def string(self, key: str, default: str) -> str:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._fail(key, "a string")
        return value


def _parse_dtype(raw: Mapping[str, Any], source: str) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"{source}: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}.")
    return dtype


def _parse_rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    top = _Reader(raw, source)
    parameters = {**top.object("rope_scaling"), **top.object("rope_parameters")}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    reader = _Reader(parameters, f"{source}: rope")
    theta = reader.number("rope_theta", top.number("rope_theta", 10000.0))
    if theta <= 1.0:
        raise CheckpointError(f"{source}: rope_theta {theta} is not above 1; published models have 10000 and more.")
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta)
    if rope_type != "yarn":
        raise CheckpointError(
            f"{source}: rope type {rope_type!r} is not supported; supported are 'default' (no scaling) and 'yarn'."
        )
    original = reader.optional_integer("original_max_position_embeddings")
    if not original:
        raise CheckpointError(
            f"{source}: rope of type 'yarn' needs original_max_position_embeddings, the length trained before scaling."
        )
    if parameters.get("factor") is None:
        factor = top.integer("max_position_embeddings") / original
    else:
        factor = reader.number("factor", 1.0)
    if factor <= 0:
        raise CheckpointError(f"{source}: rope factor {factor} is not positive.")
    optional = {
        key: None if parameters.get(key) is None else reader.number(key, 0.0)
        for key in ("mscale", "mscale_all_dim", "attention_factor")
    }
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=reader.number("beta_fast", 32.0) or 32.0,
        beta_slow=reader.number("beta_slow", 1.0) or 1.0,
        mscale=optional["mscale"],
        mscale_all_dim=optional["mscale_all_dim"],
        attention_factor=optional["attention_factor"],
        truncate=reader.boolean("truncate", True),
    )


def _parse_quantization(raw: Mapping[str, Any], source: str) -> tuple[int, int] | None:
    quantization = _Reader(raw, source).object("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2):
        raise CheckpointError(
            f"{source}: quantization_config quant_method={method!r} weight_block_size={block!r} is not supported; "
            "supported are BF16 or float32 weights, and quant_method 'fp8' with weight_block_size, as DeepSeek-V3's."
        )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"{source}: FP8 format {quantization['fmt']!r} is not supported, only 'e4m3' is.")
    if not all(isinstance(size, int) and size > 0 for size in block):
        raise CheckpointError(f"{source}: weight_block_size {block} is not two positive integers.")
    return (block[0], block[1])


def _check(config: ModelConfig, source: str) -> None:
    def refuse(text: str) -> None:
        raise CheckpointError(f"{source}: {text}")

    if config.qk_rope_head_dim % 2:
        refuse(f"qk_rope_head_dim {config.qk_rope_head_dim} is odd; rope turns pairs.")
    if config.q_lora_rank == 0:
        refuse("q_lora_rank must not be 0; use null for none.")
    if config.rms_norm_eps <= 0.0:
        refuse(f"rms_norm_eps {config.rms_norm_eps} is not positive.")
    num_layers = config.num_hidden_layers + config.num_mtp_layers
    if num_layers * max(1, config.n_routed_experts) > MAX_EXPERTS:
        refuse(
            f"{num_layers} layers (num_hidden_layers, num_nextn_predict_layers) of {config.n_routed_experts} experts "
            f"(n_routed_experts) are more than the {MAX_EXPERTS} in all that any model has; correct these."
        )
    if any(config.is_moe_layer(i) for i in range(config.num_hidden_layers + config.num_mtp_layers)):
        if config.moe_intermediate_size < 1 or config.num_experts_per_tok < 1:
            refuse("moe_intermediate_size and num_experts_per_tok must be positive where layers have experts.")
        if config.n_routed_experts % config.n_group:
            refuse(f"n_routed_experts {config.n_routed_experts} is no multiple of n_group {config.n_group}.")
        if not 1 <= config.topk_group <= config.n_group:
            refuse(f"topk_group {config.topk_group} is not within 1 and n_group {config.n_group}.")
        candidates = config.n_routed_experts // config.n_group * config.topk_group
        if config.num_experts_per_tok > candidates:
            refuse(
                f"num_experts_per_tok {config.num_experts_per_tok} exceeds the {candidates} experts that "
                "the chosen groups hold."
            )
        if config.topk_method == "noaux_tc" and config.n_routed_experts // config.n_group < 2:
            refuse("noaux_tc scores a group by its two best experts, so a group must hold at least two.")
