"""Logits of the GPU's model against transformers' on the same weights: DeepSeek-V2-Lite's shape, and the embedded model."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.gpu.backend import GpuBackend
from executor.kv_cache import LatentCache
from executor.memory import MemoryMeter
from executor.model.config import load_config
from executor.order_loop import StepLimits
from executor.orders import read_batch
from executor.weights.random_weights import RandomWeights
from executor.weights.source import TensorSource
from rorqual.core.config import ExecutorConfig
from rorqual.kernels.loader import KernelLibrary
from rorqual.v1 import executor_pb2
from tests.support.executor_fakes import admit, prefill

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny"
V2_LITE = ROOT / "benchmarks" / "serving" / "shapes" / "deepseek-v2-lite"
NUM_LAYERS = 5  # of V2-Lite: one dense, four of experts


def ours(source: TensorSource, device: torch.device, tokens: list[int], num_decoded: int) -> torch.Tensor:
    """float32 [1 + num_decoded, vocab]: logits after the prompt, computed in the prefill form, and after each of the
    last tokens, one decode step each (which are made to be the given ones)."""
    config = ExecutorConfig(max_num_seqs=2, max_num_batched_tokens=1024)
    backend = GpuBackend(source, config, 1024)
    backend.kv_room(config, MemoryMeter.of(device))
    cache = LatentCache(backend.config, 20, dtype=torch.bfloat16, device=device)
    cache.fill_(float("nan"))
    vocab_size = backend.config.vocab_size
    limits = StepLimits(vocab_size=vocab_size, max_model_len=1024, max_num_seqs=2, max_num_batched_tokens=1024)
    loop = backend.make_loop(cache, limits, traced=False)
    backend.warm_up(MemoryMeter.of(device))
    rows: list[torch.Tensor] = []
    num_prompt = len(tokens) - num_decoded
    batch_ids = itertools.count(1)
    for i in range(num_decoded + 1):
        history = tokens[: num_prompt + i]
        blocks = list(range(-(-len(history) // 64)))
        # The prompt's KV stays from the first round; then the newest token is all that is computed, by a decode step.
        cached = len(history) - 1 if i else 0
        order = admit(i + 1, history, blocks, num_prompt=len(history), num_cached=cached, max_total=len(history) + 1)
        orders = [order, prefill(i + 1, history, cached)]
        loop.submit(read_batch(executor_pb2.OrderBatch(batch_id=next(batch_ids), orders=orders)))
        while loop.run_once():
            pass
        rows.append(loop._engine._logits[0].clone())
    return torch.stack(rows)


def oracle(folder: Path, config_changes: dict[str, Any], source: Any, dtype: torch.dtype, device: torch.device) -> Any:
    raw = json.loads((folder / "config.json").read_text()) | config_changes
    names = "DeepseekV2" if raw["model_type"] == "deepseek_v2" else "DeepseekV3"
    raw = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "torch_dtype")}
    config = getattr(transformers, names + "Config")(**raw)
    config._attn_implementation = "eager"
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = getattr(transformers, names + "ForCausalLM")(config)
    finally:
        torch.set_default_dtype(default)
    wanted = model.state_dict()
    for name in source.shapes:
        if name in wanted:
            wanted[name].copy_(source.tensor(name, dtype))
    # Experts are stacked there: gate and up in one tensor, expert by expert.
    for name, tensor in wanted.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        prefix = name.rsplit(".", 1)[0]
        for expert in range(tensor.shape[0]):
            parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
            tensor[expert].copy_(
                torch.cat([source.tensor(f"{prefix}.{expert}.{part}_proj.weight", dtype) for part in parts])
            )
    return model.eval()


@pytest.mark.parametrize("shape", ["v2-lite", "embedded"])
def test_logits_are_transformers(shape: str, library: KernelLibrary, device: torch.device) -> None:
    folder = V2_LITE if shape == "v2-lite" else TINY
    config = load_config(folder)
    changes: dict[str, Any] = {"num_nextn_predict_layers": 0}
    if shape == "v2-lite":
        changes["num_hidden_layers"] = NUM_LAYERS
    config = dataclasses.replace(
        config, num_mtp_layers=0, num_hidden_layers=changes.get("num_hidden_layers", config.num_hidden_layers)
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, min(config.vocab_size, 8000), (205,), generator=generator).tolist()

    def source() -> Any:
        return RandomWeights(config, seed=5, dtype=torch.bfloat16, device=device)

    got = ours(source(), device, tokens, 5)
    with torch.inference_mode():
        exact_model = oracle(folder, changes, source(), torch.float32, device)
        exact = exact_model(torch.tensor([tokens], device=device)).logits[0, -6:].float()
        del exact_model
        rounded_model = oracle(folder, changes, source(), torch.bfloat16, device)
        rounded = rounded_model(torch.tensor([tokens], device=device)).logits[0, -6:].float()
        del rounded_model
    torch.cuda.empty_cache()
    off = ((got - exact).norm(dim=1) / exact.norm(dim=1)).tolist()
    theirs = ((rounded - exact).norm(dim=1) / exact.norm(dim=1)).tolist()
    print(f"{shape}: relative distance from float32, ours {off}, transformers' BF16 {theirs}")
    # The same roundings in other places: as near to float32 as transformers' own BF16, and a token's choice of experts
    # may differ where two scores are that near.
    assert max(off) < 1.5 * max(theirs) + 0.005
    assert max(off) < 0.08
    same = (got.argmax(dim=1) == exact.argmax(dim=1)).float().mean()
    margin = exact.topk(2, dim=1).values
    clear = (margin[:, 0] - margin[:, 1]) > 0.1 * exact.std(dim=1)
    assert (got.argmax(dim=1) == exact.argmax(dim=1))[clear].all(), same
