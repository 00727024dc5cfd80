"""The published tensor names of an architecture, and the shapes they must have."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rorqual.core.errors import CheckpointError

from ..model.config import ModelConfig
from .files import CheckpointFiles, TensorInfo

IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")  # old conversions store it; it follows from the config
FLOATS = {"F32", "F16", "BF16"}
SCALE_SUFFIX = "_scale_inv"

Shapes = dict[str, tuple[int, ...]]


def main_tensors(config: ModelConfig) -> Shapes:
    """Every tensor of the main model."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for i in range(config.num_hidden_layers):
        shapes.update(layer_tensors(config, i))
    return shapes


def layer_tensors(config: ModelConfig, layer_idx: int) -> Shapes:
    """The tensors of one decoder layer; an MTP layer's block has those of its index too."""
    prefix = f"model.layers.{layer_idx}."
    hidden, heads = config.hidden_size, config.num_attention_heads
    attn: Shapes = {
        "kv_a_proj_with_mqa.weight": (config.latent_dim, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        attn["q_proj.weight"] = (heads * config.qk_head_dim, hidden)
    else:
        attn["q_a_proj.weight"] = (config.q_lora_rank, hidden)
        attn["q_a_layernorm.weight"] = (config.q_lora_rank,)
        attn["q_b_proj.weight"] = (heads * config.qk_head_dim, config.q_lora_rank)
    if config.attention_bias:
        attn["kv_a_proj_with_mqa.bias"] = (config.latent_dim,)
        attn["o_proj.bias"] = (hidden,)
        if config.q_lora_rank is not None:
            attn["q_a_proj.bias"] = (config.q_lora_rank,)
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes.update({f"self_attn.{name}": shape for name, shape in attn.items()})
    if not config.is_moe_layer(layer_idx):
        shapes.update(_mlp("mlp", config.intermediate_size, hidden))
    else:
        shapes["mlp.gate.weight"] = (config.n_routed_experts, hidden)
        if config.topk_method == "noaux_tc":
            shapes["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
        for expert in range(config.n_routed_experts):
            shapes.update(_mlp(f"mlp.experts.{expert}", config.moe_intermediate_size, hidden))
        if config.n_shared_experts:
            width = config.moe_intermediate_size * config.n_shared_experts
            shapes.update(_mlp("mlp.shared_experts", width, hidden))
    return {prefix + name: shape for name, shape in shapes.items()}


def mtp_tensors(config: ModelConfig, depth: int) -> tuple[Shapes, Shapes]:
    """(needed, optional) tensors of MTP layer `depth`; the optional ones default to the main model's."""
    layer_idx = config.num_hidden_layers + depth
    prefix = f"model.layers.{layer_idx}."
    hidden = config.hidden_size
    needed = layer_tensors(config, layer_idx)
    needed[prefix + "enorm.weight"] = (hidden,)
    needed[prefix + "hnorm.weight"] = (hidden,)
    needed[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
    needed[prefix + "shared_head.norm.weight"] = (hidden,)
    optional: Shapes = {
        prefix + "embed_tokens.weight": (config.vocab_size, hidden),
        prefix + "shared_head.head.weight": (config.vocab_size, hidden),
    }
    return needed, optional


def _mlp(prefix: str, width: int, hidden: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def check_tensors(files: CheckpointFiles, config: ModelConfig) -> int:
    """Compare every tensor's name, shape and dtype with what the configuration asks for.

    Returns how many MTP layers the checkpoint holds: all the configured ones, or none. Raises CheckpointError,
    naming file and tensor.
    """
    present = files.tensors
    needed = main_tensors(config)
    optional: Shapes = {"lm_head.weight": (config.vocab_size, config.hidden_size)} if config.tie_word_embeddings else {}
    num_mtp = 0
    for depth in range(config.num_mtp_layers):
        prefix = f"model.layers.{config.num_hidden_layers + depth}."
        if any(name.startswith(prefix) for name in present):
            mtp_needed, mtp_optional = mtp_tensors(config, depth)
            needed.update(mtp_needed)
            optional.update(mtp_optional)
            num_mtp = depth + 1
    known = needed | optional
    absent = [name for name in needed if name not in present]
    if absent:
        strange = [name for name in present if name not in known and name.removesuffix(SCALE_SUFFIX) not in known]
        beside = f", and {strange[0]!r} is in one unasked" if strange else ""
        raise CheckpointError(
            f"{files.path}: tensor {absent[0]!r} {list(needed[absent[0]])} {files.place_of(absent[0])} "
            f"({len(absent)} of {len(needed)} are missing){beside}; weights and config.json do not fit, or the download "
            "is incomplete."
        )
    scales: set[str] = set()
    for name, info in present.items():
        if name in known:
            _check_shape(info, known[name])
            if info.dtype == "F8_E4M3":
                scales.add(_check_scale(info, present, config))
            elif info.dtype not in FLOATS:
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} has dtype {info.dtype}; float32, float16, bfloat16 and, with block "
                    "scales, float8_e4m3 are supported."
                )
    for name, info in present.items():
        if name not in known and name not in scales and not IGNORED.search(name):
            raise CheckpointError(
                f"{info.file}: unexpected tensor {name!r} {list(info.shape)}, which config.json does not account "
                f"for{_hint(name, config)}"
            )
    return num_mtp


def _hint(name: str, config: ModelConfig) -> str:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match and int(match[1]) >= config.num_hidden_layers:
        return (
            f": it has {config.num_hidden_layers} layers and num_nextn_predict_layers {config.num_mtp_layers}; "
            "correct these, or remove the tensor."
        )
    if name.endswith(SCALE_SUFFIX):
        return ": its weight is not FP8; the file mixes two conversions."
    return "; weights and config.json are of different models."


def _check_shape(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, config.json asks for {list(shape)}; "
            "weights and config.json are of different models."
        )


def _check_scale(info: TensorInfo, present: Mapping[str, TensorInfo], config: ModelConfig) -> str:
    name = info.name + SCALE_SUFFIX
    if config.fp8_block_size is None:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} is FP8, but config.json has no quantization_config; restore "
            '{"quant_method": "fp8", "weight_block_size": [128, 128]} there.'
        )
    if len(info.shape) != 2:
        raise CheckpointError(f"{info.file}: tensor {info.name!r} is FP8 and no matrix; only linear weights can be.")
    scale = present.get(name)
    if scale is None:
        raise CheckpointError(f"{info.file}: tensor {info.name!r} is FP8, but its scales {name!r} are missing.")
    bn, bk = config.fp8_block_size
    _check_shape(scale, (-(-info.shape[0] // bn), -(-info.shape[1] // bk)))
    return name
