"""Checkpoints that look alike and are not: which are served, as what, and which are refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.model.config import parse_config
from executor.model.moe import MoeMlp
from executor.model.rope import Rope
from executor.weights import load_model
from executor.weights.loader import build_model
from executor.weights.names import main_tensors
from executor.weights.source import open_source
from rorqual import kernels
from rorqual.core.config import ExecutorConfig
from rorqual.core.config_loader import load_config
from rorqual.core.errors import CheckpointError
from tests.golden.checkpoints import V2, V3, quantize_fp8, random_tensors, write_checkpoint
from tests.golden.harness import load_into, oracle, prefill_logits, random_tokens

FP8 = V3 | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}}
TOKENS = random_tokens(20, seed=1)
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def logits(folder: Path) -> torch.Tensor:
    return prefill_logits(load_model(folder, dtype=torch.float32), TOKENS, [len(TOKENS)])


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, dtype=torch.float32)
    return str(caught.value)


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(V3)
    folder = write_checkpoint(tmp_path / "a", V3, tensors, num_shards=4)
    expected = logits(folder)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "other.safetensors")
    (folder / "model.safetensors").write_bytes(b"no such thing")
    assert torch.equal(logits(folder), expected)


def test_numbered_files_without_an_index_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, V3, random_tensors(V3), num_shards=4)
    (folder / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json: missing, though 4 of 4 numbered files are there" in refusal(folder)
    (folder / "model-00003-of-00004.safetensors").unlink()
    assert "without model-00003-of-00004.safetensors" in refusal(folder)


def test_a_file_one_byte_short_is_told_with_both_sizes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, V3, random_tensors(V3), num_shards=4)
    file = folder / "model-00002-of-00004.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    text = refusal(folder)
    assert file.name in text
    assert f"ends at byte {size} and the file has {size - 1}" in text


@pytest.mark.parametrize("base", [V3, V2 | {"q_lora_rank": None, "tie_word_embeddings": True}], ids=["v3", "v2"])
def test_every_tensor_of_the_model_is_read_once(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model is built of is what its configuration asks for: nothing is left at a made-up value."""
    folder = write_checkpoint(tmp_path, base, random_tensors(base))
    with open_source(folder, dtype=torch.float32, device=torch.device("cpu")) as source:
        read: list[str] = []
        tensor = type(source).tensor
        monkeypatch.setattr(
            type(source), "tensor", lambda self, name, *rest: (read.append(name), tensor(self, name, *rest))[1]
        )
        build_model(source)
    wanted = set(main_tensors(parse_config(base, "config.json")))
    assert set(read) == wanted
    assert len(read) - len(wanted) == int(bool(base.get("tie_word_embeddings")))  # the head is the embedding again


# --- FP8 and other dtypes -----------------------------------------------------------------------------------------


def test_a_partial_block_has_a_scale_of_its_own() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(576, 256, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 2, generator=generator) + 0.5
    rows, columns = torch.arange(576) // 128, torch.arange(256) // 128
    expected = weight.float() * scale[rows][:, columns]
    assert torch.equal(kernels.fp8_block_dequantize(weight, scale, (128, 128), torch.float32), expected)
    assert torch.equal(expected[-64:], weight[-64:].float() * scale[4, columns])


@pytest.mark.parametrize("num_rows", [-1, 1])
def test_scales_of_another_number_are_told_with_both_shapes(tmp_path: Path, num_rows: int) -> None:
    tensors = quantize_fp8(random_tensors(V3), (32, 32))[0]
    name = O_PROJ + "_scale_inv"
    right = tensors[name].shape
    tensors[name] = torch.ones(right[0] + num_rows, right[1])
    text = refusal(write_checkpoint(tmp_path, FP8, tensors))
    for word in (name, str(list(right)), str([right[0] + num_rows, right[1]])):
        assert word in text


def test_each_tensor_is_of_the_dtype_that_its_header_says(tmp_path: Path) -> None:
    """Under a configuration that says FP8: all bfloat16, or a mixture, or scales of two dtypes."""
    plain = {name: tensor.bfloat16() for name, tensor in random_tensors(V3).items()}
    expected = logits(write_checkpoint(tmp_path / "plain", V3, plain))
    assert torch.equal(logits(write_checkpoint(tmp_path / "all", FP8, plain)), expected)
    # Scales that are powers of two lose nothing in F8_E8M0.
    stored = dict(plain)
    for number, name in enumerate(sorted(name for name in plain if "layers.1.self_attn" in name and "proj" in name)):
        shape = [-(-size // 32) for size in plain[name].shape]
        scale = torch.full(shape, 0.25)
        stored[name] = (plain[name].float() * 4).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale if number % 2 else scale.to(torch.float8_e8m0fnu)
    back = {
        name: (tensor.float() / 4).bfloat16() if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    mixed = logits(write_checkpoint(tmp_path / "mixed", FP8, stored))
    assert torch.equal(mixed, logits(write_checkpoint(tmp_path / "back", V3, back)))
    assert {scale.dtype for name, scale in stored.items() if name.endswith("_scale_inv")} == {
        torch.float32,
        torch.float8_e8m0fnu,
    }


@pytest.mark.parametrize("name", [O_PROJ + "_scale_inv", "model.layers.1.self_attn.o_proj.scale"])
def test_a_scale_without_its_weight_is_refused(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(V3) | {name: torch.ones(3, 2)}
    assert name in refusal(write_checkpoint(tmp_path, FP8, tensors))


# --- projections, routing, positions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base",
    [
        V3 | {"q_lora_rank": 32, "first_k_dense_replace": 0},
        V3 | {"q_lora_rank": None, "first_k_dense_replace": 1},
        V2 | {"q_lora_rank": 32, "first_k_dense_replace": 0, "n_group": None, "topk_group": None},
        V2 | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_group": None, "topk_group": None},
    ],
)
def test_queries_with_and_without_a_low_rank(base: dict[str, Any], tmp_path: Path) -> None:
    tensors = random_tensors(base)
    assert any(name.endswith("q_proj.weight") for name in tensors) == (base["q_lora_rank"] is None)
    model = oracle({name: value for name, value in base.items() if value is not None or name == "q_lora_rank"})
    load_into(model, tensors)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(write_checkpoint(tmp_path, base, tensors)), expected, rtol=0, atol=1e-4)


def test_one_kind_with_the_configuration_of_the_other(tmp_path: Path) -> None:
    full, low = V3 | {"q_lora_rank": None}, V3 | {"q_lora_rank": 32}
    for number, (config, other) in enumerate(((full, low), (low, full))):
        text = refusal(write_checkpoint(tmp_path / str(number), config, random_tensors(other)))
        assert "self_attn.q_proj.weight" in text
        assert "self_attn.q_a_" in text
    absent = {name: value for name, value in full.items() if name != "q_lora_rank"}
    assert parse_config(absent, "c") == parse_config(full, "c")
    with pytest.raises(CheckpointError, match="q_lora_rank must not be 0; use null for none"):
        parse_config(V3 | {"q_lora_rank": 0}, "c")


def test_routing_follows_the_configuration_not_the_class() -> None:
    def of(config: dict[str, Any]) -> tuple[str, str]:
        parsed = parse_config(config, "c")
        return parsed.scoring_func, parsed.topk_method

    assert of(V2) == ("softmax", "greedy")
    assert of(V3) == ("sigmoid", "noaux_tc")
    swapped = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    assert of(V2 | swapped) == ("sigmoid", "noaux_tc")
    assert of(V3 | {"scoring_func": "softmax", "topk_method": "group_limited_greedy"})[1] == "group_limited_greedy"


def test_a_routing_bias_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for number, bad in enumerate((math.nan, math.inf)):
        tensors = random_tensors(V3)
        tensors[name][2] = bad
        text = refusal(write_checkpoint(tmp_path / str(number), V3, tensors))
        assert name in text
        assert "not finite" in text


def test_a_large_bias_costs_no_precision() -> None:
    """Bias 12 beside scores of 1e-8: the weights are the scores' own, not differences of sums."""
    logit = torch.tensor([[-18.4, -18.9, -19.3, -17.9], [-100.0, 100.0, 0.0, -100.0]])
    scores = logit.sigmoid()
    ids, weights = kernels.route(
        scores,
        torch.full((4,), 12.0),
        top_k=2,
        topk_method="noaux_tc",
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        scale_normed=True,
        routed_scaling_factor=2.5,
    )
    exact = logit.double().sigmoid().gather(1, ids.long())
    assert bool(weights.isfinite().all())
    torch.testing.assert_close(weights.double(), 2.5 * exact / exact.sum(-1, keepdim=True), rtol=1e-3, atol=0)
    assert ids[1].tolist() == [1, 2]


def test_the_routing_bias_is_float32_whatever_the_model_computes_in(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(V3).items()}
    with open_source(
        write_checkpoint(tmp_path, V3, tensors), dtype=torch.bfloat16, device=torch.device("cpu")
    ) as source:
        model = build_model(source)
    biases = [layer.mlp.router.bias for layer in model._parts.layers if isinstance(layer.mlp, MoeMlp)]
    assert biases
    assert all(bias is not None and bias.dtype == torch.float32 for bias in biases)


def test_routing_of_other_families_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="sqrtsoftplus"):
        parse_config(V3 | {"scoring_func": "sqrtsoftplus"}, "c")


def test_more_devices_than_one_are_not_promised(capsys: pytest.CaptureFixture[str]) -> None:
    """No slice of a weight, and of its scales, is ever wrong: there is none."""
    with pytest.raises(SystemExit):
        load_config(ExecutorConfig, ["--tensor-parallel-size", "2"], prog="executor", environ={})
    assert "tensor-parallel-size" in capsys.readouterr().err


YARN_40 = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
PUBLISHED = {  # V3's and V2's: mscale, and the factor on the scale of the softmax
    "v3": (V3 | {"max_position_embeddings": 163840}, 1.0, 1.87385),
    "v2": (V2 | {"max_position_embeddings": 163840}, 0.707, 1.58963),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_yarn_in_every_spelling(kind: str) -> None:
    base, mscale, factor = PUBLISHED[kind]
    scaling = YARN_40 | {"mscale": mscale, "mscale_all_dim": mscale}
    spellings = [
        base | {"rope_theta": 10000, "rope_scaling": scaling | {"type": "yarn"}},
        base | {"rope_theta": 10000, "rope_scaling": scaling | {"rope_type": "yarn"}},
        base | {"rope_parameters": scaling | {"rope_type": "yarn", "rope_theta": 10000}},
    ]
    configs = [parse_config(spelling, "c") for spelling in spellings]
    assert configs[0] == configs[1] == configs[2]
    config = configs[0]
    assert config.softmax_scale * config.qk_head_dim**0.5 == pytest.approx(factor, rel=1e-5)
    assert config.rope.cos_sin_scale == pytest.approx(1.0)
    assert config.max_position_embeddings == 163840  # what is served: not times the factor once more
    for without in ({"mscale_all_dim": 0}, {"mscale_all_dim": None}):
        plain = parse_config(base | {"rope_scaling": scaling | without | {"type": "yarn"}}, "c")
        assert plain.softmax_scale == pytest.approx(plain.qk_head_dim**-0.5)


def test_a_longer_table_changes_no_angle() -> None:
    config = parse_config(PUBLISHED["v3"][0] | {"rope_scaling": YARN_40 | {"type": "yarn", "mscale_all_dim": 1.0}}, "c")
    first = []
    for length in (2048, 4096, 163840, 0):
        rope = Rope(config.rope, 64, torch.device("cpu"), deterministic=True)
        rope.grow(length)
        first.append(rope.angles(torch.arange(16)))
    assert all(torch.equal(angles, first[0]) for angles in first)


def test_angles_far_out_are_those_of_the_formula() -> None:
    config = parse_config(PUBLISHED["v3"][0] | {"rope_theta": 10000, "rope_scaling": YARN_40 | {
        "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}}, "c")  # fmt: skip
    dim = 64
    rope = Rope(config.rope, dim, torch.device("cpu"), deterministic=True)
    positions = [0, 1, 4095, 4096, 100_000]
    rope.grow(max(positions) + 1)
    angles = rope.angles(torch.tensor(positions))

    def correction(rotations: float) -> float:
        return dim * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(10000))

    low, high = math.floor(correction(32)), math.ceil(correction(1))
    x = torch.arange(1.0, dim + 1)[None]
    for row, position in enumerate(positions):
        turned = rope.turn(x.clone(), angles[row : row + 1])[0]
        for pair in range(dim // 2):
            plain = 10000 ** (-2 * pair / dim)
            ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
            angle = position * (plain / 40 * ramp + plain * (1 - ramp))
            a, b = 2 * pair + 1.0, 2 * pair + 2.0  # neighbours, as checkpoints have them
            expected = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
            # A frequency in float32 is right to 1.2e-7 of itself, and so is the angle; the pair is up to 91 long.
            error = 1e-4 + abs(angle) * 1.2e-7 * 91
            assert turned[2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected, abs=error)
