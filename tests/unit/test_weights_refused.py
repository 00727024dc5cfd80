"""Checkpoints that cannot be served are refused before any weight is read, naming file, tensor and cure."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.weights import CheckpointFiles, load_model
from rorqual.core.errors import CheckpointError
from tests.golden.checkpoints import V2, V3, quantize_fp8, random_tensors, write_checkpoint

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
Damage = Callable[[Path], None]


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error's text; reading a tensor's data before it is an error of its own."""

    def read(self: CheckpointFiles, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read before the checkpoint was refused")

    monkeypatch.setattr(CheckpointFiles, "read", read)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, dtype=torch.float32)
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, V3, random_tensors(V3), num_shards=3)


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_shard(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def a_tensor_of(folder: Path, shard: str) -> str:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(name for name, file in weight_map.items() if file == shard and name.endswith("proj.weight"))


def test_missing_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / SHARD).unlink()
    text = refusal(sharded, monkeypatch)
    assert SHARD in text
    assert "model." in text
    assert "download" in text


def test_index_names_an_absent_file(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = a_tensor_of(sharded, SHARD)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({name: "model-00009-of-00003.safetensors"}))
    text = refusal(sharded, monkeypatch)
    assert "model-00009-of-00003.safetensors" in text
    assert name in text


def test_index_points_at_the_wrong_file(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = a_tensor_of(sharded, SHARD)
    other = "model-00001-of-00003.safetensors"
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({name: other}))
    text = refusal(sharded, monkeypatch)
    assert other in text
    assert name in text


def test_index_omits_a_tensor(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = a_tensor_of(sharded, SHARD)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop(name))
    text = refusal(sharded, monkeypatch)
    assert SHARD in text
    assert name in text


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(sharded: Path, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sharded / SHARD
    file.write_bytes(file.read_bytes()[:keep])
    text = refusal(sharded, monkeypatch)
    assert str(file) in text
    assert "download it again" in text
    if keep == -1:
        assert "tensor 'model." in text


def test_bytes_after_the_last_tensor(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (sharded / SHARD).open("ab") as stream:
        stream.write(b"\0" * 7)
    assert SHARD in refusal(sharded, monkeypatch)


def test_header_is_no_json(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytearray((sharded / SHARD).read_bytes())
    raw[8] = 0xFF
    (sharded / SHARD).write_bytes(raw)
    assert SHARD in refusal(sharded, monkeypatch)


@pytest.mark.parametrize("header", [b"[1]", b"[" * 100_000], ids=["a list", "too deep"])
def test_header_is_no_object(header: bytes, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / SHARD).write_bytes(struct.pack("<Q", len(header)) + header)
    assert SHARD in refusal(sharded, monkeypatch)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": [1]}', "[" * 100_000], ids=range(4))
def test_index_is_none(content: str, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / INDEX).write_text(content)
    assert INDEX in refusal(sharded, monkeypatch)


def test_wrong_shape(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = a_tensor_of(sharded, SHARD)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    edit_shard(sharded / SHARD, change)
    text = refusal(sharded, monkeypatch)
    assert SHARD in text
    assert name in text
    assert "shape" in text


def test_wrong_dtype(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = a_tensor_of(sharded, SHARD)
    edit_shard(sharded / SHARD, lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))
    text = refusal(sharded, monkeypatch)
    assert name in text
    assert "I32" in text


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.2.mlp.gate.weight"]
)
def test_missing_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(V3)
    del tensors[name]
    text = refusal(write_checkpoint(tmp_path, V3, tensors), monkeypatch)
    assert name in text
    assert str(tmp_path / "model.safetensors") in text


def test_a_missing_tensor_that_no_index_lists_is_placed_by_its_neighbours(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit_shard(sharded / weight_map[name], lambda tensors: tensors.pop(name))
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop(name))
    text = refusal(sharded, monkeypatch)
    assert f"{name!r} [" in text
    assert f"is not listed in {sharded / INDEX}" in text
    layer = {file for other, file in weight_map.items() if other.startswith("model.layers.1.")}
    assert f"other tensors of model.layers.1 are in {', '.join(sorted(layer))}" in text
    assert "(1 of " in text


def test_a_missing_tensor_that_the_index_lists_is_named_with_its_file(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = a_tensor_of(sharded, SHARD)
    edit_shard(sharded / SHARD, lambda tensors: tensors.pop(name))
    text = refusal(sharded, monkeypatch)
    assert f"{sharded / SHARD}: does not hold tensor {name!r}" in text


def edit_header(file: Path, change: Callable[[str], str]) -> None:
    """Rewrite a file's header as text; its data stay as they are."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = change(raw[8 : 8 + length].decode().rstrip()).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def test_a_tensor_named_twice_in_a_file(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = a_tensor_of(sharded, SHARD)
    entries = json.loads((sharded / SHARD).read_bytes()[8:].split(b"}}")[0] + b"}}")
    again = json.dumps({name: entries[name]})[1:]
    edit_header(sharded / SHARD, lambda header: header.removesuffix("}") + "," + again)
    text = refusal(sharded, monkeypatch)
    assert f"{sharded / SHARD}: the header names {name!r} twice" in text
    assert "download it again" in text


def test_a_tensor_named_twice_in_the_index(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = a_tensor_of(sharded, SHARD)
    index = (sharded / INDEX).read_text()
    (sharded / INDEX).write_text(index.replace('"weight_map": {', f'"weight_map": {{"{name}": "{SHARD}", ', 1))
    text = refusal(sharded, monkeypatch)
    assert f"{sharded / INDEX}: names {name!r} twice" in text


@pytest.mark.parametrize("shift", [-4, 4])
def test_tensors_that_share_bytes_or_leave_some(shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, V3, random_tensors(V3))

    def change(header: str) -> str:
        entries = json.loads(header)
        names = sorted(entries.keys() - {"__metadata__"}, key=lambda name: entries[name]["data_offsets"])
        begin, end = entries[names[3]]["data_offsets"]
        entries[names[3]]["data_offsets"] = [begin + shift, end + shift]
        return json.dumps(entries)

    edit_header(folder / "model.safetensors", change)
    text = refusal(folder, monkeypatch)
    assert "model.safetensors: " in text
    assert ("share bytes" if shift < 0 else "4 bytes before tensor") in text


@pytest.mark.parametrize("how", ["../x", "absolute", "deeper", ".", ""])
def test_an_index_that_points_outside_the_folder(how: str, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = sharded.parent / f"{sharded.name}-outside.safetensors"
    (sharded / "deeper").mkdir()
    for place in (outside, sharded / "deeper" / SHARD):
        place.write_bytes((sharded / SHARD).read_bytes())
    points_at = {"../x": f"../{outside.name}", "absolute": str(outside), "deeper": f"deeper/{SHARD}"}.get(how, how)
    name = a_tensor_of(sharded, SHARD)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({name: points_at}))
    text = refusal(sharded, monkeypatch)
    assert str(sharded / INDEX) in text
    assert f"{name!r} is in {points_at!r}, which is not the name of a file in this folder" in text
    outside.unlink()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_link_that_leads_out_of_the_folder(num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "model", V3, random_tensors(V3), num_shards=num_shards)
    file = folder / (SHARD if num_shards > 1 else "model.safetensors")
    outside = file.rename(tmp_path / "elsewhere")
    file.symlink_to(outside)
    text = refusal(folder, monkeypatch)
    assert f"{file}: is a link out of the folder, to {outside}" in text


@pytest.mark.parametrize("num_shards", [1, 3])
def test_links_of_a_hugging_face_cache_are_followed(num_shards: int, tmp_path: Path) -> None:
    repository = tmp_path / "models--some--one"
    folder = write_checkpoint(repository / "snapshots" / "abc", V3, random_tensors(V3), num_shards=num_shards)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(repository / "blobs" / f"{number:040x}")
        file.symlink_to(Path("..") / ".." / "blobs" / blob.name)
    assert load_model(folder, dtype=torch.float32).config.num_hidden_layers == V3["num_hidden_layers"]


def test_a_link_to_the_folder_itself_is_followed(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sharded)
    with CheckpointFiles(tmp_path / "link") as files:
        assert len(files.files) == 3


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
def test_a_byte_order_mark_is_no_fault(name: str, sharded: Path) -> None:
    (sharded / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    file = sharded / name
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_model(sharded, dtype=torch.float32).config.vocab_size == V3["vocab_size"]


@pytest.mark.parametrize("name", ["model.layers.7.input_layernorm.weight", "model.vision.weight"])
def test_unexpected_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, V3, random_tensors(V3) | {name: torch.ones(72)})
    text = refusal(folder, monkeypatch)
    assert name in text
    assert "model.safetensors" in text


def test_half_an_mtp_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(V3, mtp=True)
    del tensors["model.layers.3.eh_proj.weight"]
    assert "model.layers.3.eh_proj.weight" in refusal(write_checkpoint(tmp_path, V3, tensors), monkeypatch)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    load_model(write_checkpoint(tmp_path, V3, random_tensors(V3) | buffer), dtype=torch.float32)


def test_tokenizer_larger_than_the_embedding(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = {f"t{i}": i for i in range(211)}
    added = [{"id": 211, "content": "<｜User｜>"}]
    (sharded / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    text = refusal(sharded, monkeypatch)
    assert "tokenizer.json" in text
    assert "<｜User｜>" in text
    assert "embed_tokens" in text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        "[]",
        '{"model": null}',
        '{"model": {"vocab": {"a": "first"}}}',
        '{"model": {"vocab": {}}, "added_tokens": ["a"]}',
    ],
    ids=range(6),
)
def test_tokenizer_is_none(content: str, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / "tokenizer.json").write_text(content)
    text = refusal(sharded, monkeypatch)
    assert "tokenizer.json" in text
    assert "download it again" in text


def test_tokenizer_that_fits(sharded: Path) -> None:
    (sharded / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 210}}}))
    load_model(sharded, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ["llama", "deepseek_v3"]),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, ["DeepseekV32ForCausalLM"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["rope", "dynamic", "yarn"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["original_max_position_embeddings"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["awq", "fp8"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["weight_block_size"]),
        ({"topk_method": "greedy"}, ["sigmoid", "greedy", "noaux_tc"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"dtype": "int8"}, ["int8"]),
        ({"n_group": 3}, ["n_group"]),
        ({"topk_group": 5}, ["topk_group"]),
        ({"num_experts_per_tok": 7}, ["num_experts_per_tok"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"kv_lora_rank": "many"}, ["kv_lora_rank", "many"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads"]),
        ({"architectures": 5}, ["architectures", "a list"]),
        ({"quantization_config": "fp8"}, ["quantization_config", "an object"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "an object"]),
        ({"rope_theta": 1}, ["rope_theta"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"num_hidden_layers": 10**8}, ["num_hidden_layers"]),
        ({"n_routed_experts": 10**8}, ["n_routed_experts"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers"]),
    ],
)
def test_config(change: dict[str, Any], words: list[str], sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_json(sharded / "config.json", lambda config: config.update(change))
    text = refusal(sharded, monkeypatch)
    assert "config.json" in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000], ids=range(4))
def test_config_is_no_object(content: str, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / "config.json").write_text(content)
    assert "config.json" in refusal(sharded, monkeypatch)


def test_no_config(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / "config.json").unlink()
    assert "config.json" in refusal(sharded, monkeypatch)


def test_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V2))
    (tmp_path / "pytorch_model.bin").touch()
    text = refusal(tmp_path, monkeypatch)
    assert "model.safetensors" in text
    assert "pytorch_model.bin" in text


class TestFp8:
    CONFIG = V3 | {
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
    }
    NAME = "model.layers.1.self_attn.o_proj.weight"

    @pytest.fixture
    def tensors(self) -> dict[str, torch.Tensor]:
        return quantize_fp8(random_tensors(V3), (32, 32))[0]

    def test_scale_is_missing(
        self, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        del tensors[self.NAME + "_scale_inv"]
        text = refusal(write_checkpoint(tmp_path, self.CONFIG, tensors), monkeypatch)
        assert self.NAME + "_scale_inv" in text

    def test_scale_of_another_shape(
        self, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensors[self.NAME + "_scale_inv"] = torch.ones(1, 1)
        text = refusal(write_checkpoint(tmp_path, self.CONFIG, tensors), monkeypatch)
        assert self.NAME + "_scale_inv" in text
        assert "shape" in text

    def test_config_does_not_say_so(
        self, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = refusal(write_checkpoint(tmp_path, V3, tensors), monkeypatch)
        assert "quantization_config" in text
        assert "FP8" in text
