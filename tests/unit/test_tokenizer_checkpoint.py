"""Checkpoint folders: what is read, and what is refused by naming file and cure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rorqual.core.errors import CheckpointError
from services.tokenizer.checkpoint import read_checkpoint
from services.tokenizer.vocabulary import Vocabulary
from tests.support.vocabularies import TINY_FOLDER, tiny, tiny_checkpoint, v4

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(TINY_FOLDER / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    value.update(changes)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_the_embedded_model() -> None:
    checkpoint = tiny_checkpoint()
    assert (checkpoint.vocab_size, tiny().size) == (8192, 8192)
    assert tiny().eos_ids == (1,)
    assert (tiny().bos_id, tiny().add_bos) == (0, True)
    assert set(checkpoint.chat_templates) == {"default"}
    assert checkpoint.sampling_defaults["temperature"] > 0


def test_the_published_v4_vocabulary() -> None:
    assert v4().size == 129_280
    assert v4().think_ids == (128821, 128822)
    assert not v4().add_bos
    assert 128803 in v4().control_ids
    assert 128803 not in v4().special_ids


def test_a_folder_of_tokenizer_json_alone_needs_its_end_token(folder: Path) -> None:
    for name in FILES[1:]:
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="eos_token"):
        Vocabulary(read_checkpoint(folder))


def test_templates_by_place(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("from file", encoding="utf-8")
    assert read_checkpoint(folder).chat_templates == {"default": "from file"}
    other = tmp_path / "other.jinja"
    other.write_text("from flag", encoding="utf-8")
    assert read_checkpoint(folder, chat_template_file=str(other)).chat_templates == {"default": "from flag"}
    with pytest.raises(CheckpointError, match="nowhere"):
        read_checkpoint(folder, chat_template_file="nowhere")
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    assert read_checkpoint(folder).chat_templates == {"default": "a", "tool_use": "b"}


def test_generation_config(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 7926], top_k=20, do_sample=False)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.eos_token_ids == (1, 7926)
    assert checkpoint.sampling_defaults["temperature"] == 0.0
    assert checkpoint.sampling_defaults["top_k"] == 20
    (folder / "generation_config.json").unlink()
    assert read_checkpoint(folder).eos_token_ids == (1,)


def test_the_post_processor_tells_whether_to_begin_with_bos(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", add_bos_token=None)
    assert Vocabulary(read_checkpoint(folder)).add_bos
    edit(folder / "tokenizer_config.json", add_bos_token=False)
    assert not Vocabulary(read_checkpoint(folder)).add_bos


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "cut", "cut short"),
        ("tokenizer_config.json", "cut", "cut short"),
        ("config.json", "cut", "cut short"),
        ("generation_config.json", "[1]", "object"),
        ("tokenizer.json", b"\xff\xfe", "UTF-8"),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "<end>"),
        ("config.json", {"vocab_size": 8000}, "8000"),
        ("generation_config.json", {"eos_token_id": 9000}, "9000"),
        ("generation_config.json", {"eos_token_id": "one"}, "one"),
        ("generation_config.json", {"temperature": "hot"}, "hot"),
        ("tokenizer.json", {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(folder: Path, name: str, change: Any, words: str) -> None:
    path = folder / name
    if change is None:
        path.unlink()
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif isinstance(change, bytes):
        path.write_bytes(change)
    elif isinstance(change, str):
        path.write_text(change, encoding="utf-8")
    else:
        edit(path, **change)
    with pytest.raises(CheckpointError) as caught:
        Vocabulary(read_checkpoint(folder))
    assert name in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_tokenizer_config_is_told_with_what_is_assumed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Vocabulary(read_checkpoint(folder)).add_bos
    assert caplog.text == ""
    (folder / "tokenizer_config.json").unlink()
    assert not Vocabulary(read_checkpoint(folder)).add_bos
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(folder / "tokenizer_config.json") in record.getMessage()
    assert "no begin-of-sequence token is added" in record.getMessage()


def test_a_begin_token_that_only_other_files_know_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "tokenizer_config.json", bos_token=None)
    edit(folder / "config.json", bos_token_id=0)
    assert not Vocabulary(read_checkpoint(folder)).add_bos
    assert "names no bos_token" in caplog.text
    assert "bos_token_id is 0" in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_is_no_fault(folder: Path, name: str) -> None:
    expected = Vocabulary(read_checkpoint(folder)), read_checkpoint(folder)
    path = folder / name
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    checkpoint = read_checkpoint(folder)
    assert checkpoint == expected[1]
    assert Vocabulary(checkpoint).eos_ids == expected[0].eos_ids


def test_a_byte_order_mark_does_not_begin_a_prompt(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xef\xbb\xbffrom file")
    assert read_checkpoint(folder).chat_templates == {"default": "from file"}


def test_no_folder_at_all() -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        read_checkpoint(Path("/nonexistent"))
