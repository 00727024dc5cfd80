"""What loading tells and decides: progress, dtype, fingerprint, the spellings of a configuration."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from executor.model.config import parse_config
from executor.weights import dtype as dtype_module
from executor.weights import fingerprint as fingerprint_module
from executor.weights import load_config, load_model, model_fingerprint, resolve_dtype
from rorqual.core.errors import ConfigError
from tests.golden.checkpoints import V2, V3, YARN, random_tensors, write_checkpoint


def test_progress_reaches_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = write_checkpoint(tmp_path, V3, random_tensors(V3, mtp=True), num_shards=2)
    load_model(folder, dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    done = [entry[0] for entry in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(("has_bfloat16", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype(has_bfloat16: bool, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype_module, "cpu_has_bfloat16", lambda: has_bfloat16)
    assert resolve_dtype("auto", "cpu") is wanted
    assert resolve_dtype("auto", "cuda") is torch.bfloat16
    assert resolve_dtype("float32", "cpu") is torch.float32
    assert resolve_dtype("bfloat16", "cpu") is torch.bfloat16
    with pytest.raises(ConfigError, match="float8"):
        resolve_dtype("float8", "cpu")


def test_published_and_own_spellings_agree() -> None:
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    published = V2 | {"rope_scaling": scaling | {"type": "yarn"}, "rope_theta": 10000, "torch_dtype": "float16"}
    own = V2 | {"rope_parameters": YARN, "dtype": "float16"}
    assert parse_config(published, "a") == parse_config(own, "b")


def test_softmax_scale_carries_mscale_squared() -> None:
    config = parse_config(V3 | {"rope_parameters": YARN | {"factor": 40.0, "mscale_all_dim": 1.0}}, "config.json")
    # 0.1 * ln(40) + 1 = 1.3688879454113936 (DeepSeek-V3's own); 192**-0.5 there, 40**-0.5 here.
    assert config.softmax_scale == pytest.approx(40**-0.5 * 1.3688879454113936**2, rel=1e-12)
    assert config.rope.cos_sin_scale == pytest.approx(1.0)


class TestFingerprint:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_checkpoint(tmp_path / "a", V3, random_tensors(V3), num_shards=2)

    def of(self, folder: Path, **changes: object) -> bytes:
        arguments: dict[str, object] = {"dtype": torch.float32, "kv_dtype": torch.float32} | changes
        config = arguments.pop("config", None) or load_config(folder)
        return model_fingerprint(folder, config, **arguments)  # type: ignore[arg-type]

    def test_is_the_models_not_the_folders(self, folder: Path, tmp_path: Path) -> None:
        copy = tmp_path / "b"
        shutil.copytree(folder, copy)
        assert self.of(folder) == self.of(copy)
        assert len(self.of(folder)) == 32

    def test_changes_with_all_that_changes_kv(self, folder: Path, tmp_path: Path) -> None:
        other = write_checkpoint(tmp_path / "b", V3, random_tensors(V3, seed=1), num_shards=2)
        config = load_config(folder)
        rope = dataclasses.replace(config.rope, theta=20000.0)
        prints = [
            self.of(folder),
            self.of(other),
            self.of(folder, dtype=torch.bfloat16),
            self.of(folder, kv_dtype=torch.bfloat16),
            self.of(folder, config=dataclasses.replace(config, rope=rope)),
            self.of(folder, deterministic=True),
            self.of(folder, extra={"tensor_parallel": "2"}),
        ]
        assert len(set(prints)) == len(prints)

    def test_large_files_are_sampled(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fingerprint_module, "WHOLE_FILE_BYTES", 1000)
        monkeypatch.setattr(fingerprint_module, "SAMPLE_BYTES", 100)
        before = self.of(folder)
        assert self.of(folder) == before
        file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        assert self.of(folder) != before
