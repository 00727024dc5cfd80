"""Small random checkpoints with published names, written as a training run would leave them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from executor.model.config import parse_config
from executor.weights.names import main_tensors, mtp_tensors

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 72,
    "intermediate_size": 88,
    "moe_intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 28,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.7,
}
"""Sizes that are no multiple of a vector, a tile or one another."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

V3: dict[str, Any] = BASE | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
V2: dict[str, Any] = BASE | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "topk_method": "greedy",
    "norm_topk_prob": False,
}


def random_tensors(config: Mapping[str, Any], *, seed: int = 0, mtp: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of the configuration, float32, scaled so that activations keep their size."""
    parsed = parse_config(config, "random")
    shapes = main_tensors(parsed)
    if mtp:
        for depth in range(parsed.num_mtp_layers):
            shapes |= mtp_tensors(parsed, depth)[0]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.1 * noise
        elif name.endswith(("bias", "embed_tokens.weight")):
            tensors[name] = noise * (0.1 if name.endswith("bias") else 1.0)
        else:
            tensors[name] = noise * shape[-1] ** -0.5
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    num_shards: int = 1,
) -> Path:
    """config.json and the weights in one file, or in `num_shards` with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(contiguous, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        names = list(contiguous)[shard::num_shards]
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: contiguous[name] for name in names}, folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    total = sum(tensor.numel() * tensor.element_size() for tensor in contiguous.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def quantize_fp8(
    tensors: Mapping[str, torch.Tensor], block: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(stored, dequantised): every linear weight but head, embedding and router as FP8 with block scales.

    Quantises block by block with slices, so that it shares no code with the loader's dequantisation.
    """
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() != 2 or name.endswith(("embed_tokens.weight", "head.weight", "mlp.gate.weight")):
            continue
        n, k = weight.shape
        quantised = torch.empty(n, k, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-n // block[0]), -(-k // block[1]))
        back = torch.empty(n, k)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                rows, cols = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scale = weight[rows, cols].abs().max() / 448.0
                scales[i, j] = scale
                quantised[rows, cols] = (weight[rows, cols] / scale).to(torch.float8_e4m3fn)
                back[rows, cols] = quantised[rows, cols].float() * scale
        stored[name], stored[name + "_scale_inv"], plain[name] = quantised, scales, back
    return stored, plain
