"""The text side of a checkpoint folder: what tokenizer.json and its neighbours say, checked to fit together."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rorqual.core.errors import CheckpointError

_log = logging.getLogger("tokenizer.checkpoint")

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCheckpoint:
    """What the tokenizer service takes from a folder. Absent files leave the defaults."""

    folder: Path
    tokenizer_json: str
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    unk_token: str = ""
    add_bos_token: bool | None = None  # None: what the post-processor of tokenizer.json does
    chat_templates: Mapping[str, str]  # by name; the usual one is "default"
    has_own_template: bool = True  # False: --chat-template gave it
    encoder: str = ""  # source of the checkpoint's own prompt encoder, where it has one in place of a template
    model_type: str = ""  # of config.json
    eos_token_ids: tuple[int, ...] = ()  # from generation_config.json or config.json
    sampling_defaults: Mapping[str, float]
    max_position_embeddings: int = 0  # 0: not stated
    vocab_size: int = 0  # rows of the embedding; 0: not stated


def read_checkpoint(folder: Path, *, chat_template_file: str = "") -> TextCheckpoint:
    """Read the files of `folder`. CheckpointError names the file at fault and its cure.

    What is assumed in place of a file that is absent is logged: a download may have stopped early.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: --model takes a checkpoint in the Hugging Face layout "
            "(config.json, tokenizer.json, tokenizer_config.json, generation_config.json)",
            field="model",
        )
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise CheckpointError(
            f"{tokenizer_path} is missing: download it with the checkpoint; slow formats "
            "(tokenizer.model alone) must be converted first",
            field="model",
        )
    tokenizer_config = _read_object(folder / "tokenizer_config.json")
    generation_config = _read_object(folder / "generation_config.json")
    config = _read_object(folder / "config.json")
    _log_assumptions(folder, tokenizer_config, generation_config, config)
    return TextCheckpoint(
        folder=folder,
        tokenizer_json=_read_text(tokenizer_path),
        bos_token=_token_string(tokenizer_config.get("bos_token")),
        eos_token=_token_string(tokenizer_config.get("eos_token")),
        pad_token=_token_string(tokenizer_config.get("pad_token")),
        unk_token=_token_string(tokenizer_config.get("unk_token")),
        add_bos_token=tokenizer_config.get("add_bos_token"),
        chat_templates=_chat_templates(folder, tokenizer_config, chat_template_file),
        has_own_template=not chat_template_file,
        encoder="".join(_read_text(path) for path in sorted((folder / "encoding").glob("encoding_*.py"))),
        model_type=_token_string(config.get("model_type")),
        eos_token_ids=_eos_token_ids(generation_config, config, folder),
        sampling_defaults=_sampling_defaults(generation_config, folder / "generation_config.json"),
        max_position_embeddings=int(config.get("max_position_embeddings") or 0),
        vocab_size=int(config.get("vocab_size") or 0),
    )


def _log_assumptions(
    folder: Path, tokenizer_config: Mapping[str, Any], generation_config: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        _log.warning(
            "%s is missing: no begin-of-sequence token is added to a text, and no special token has a name; if the model "
            "was trained with one, its answers are of no use: download the file",
            file,
        )
    elif not _token_string(tokenizer_config.get("bos_token")):
        # (Some models have none, and then nobody names its id either.)
        bos_id = next(
            (c["bos_token_id"] for c in (generation_config, config) if c.get("bos_token_id") is not None), None
        )
        if bos_id is not None:
            _log.warning(
                "%s names no bos_token, though bos_token_id is %s in the files beside it: no begin-of-sequence token is "
                "added to a text",
                file,
                bos_id,
            )
    if not (folder / "generation_config.json").is_file():
        _log.info(
            "%s is missing: requests that name no temperature, top_p … are sampled at temperature 1 from all tokens",
            folder / "generation_config.json",
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a byte-order mark before JSON or a template says nothing
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: download it again ({error})", field="model") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}): it may be cut short; download it again", field="model"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}", field="model")
    return value


def _token_string(value: Any) -> str:
    """A token is written as its string, or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_templates(folder: Path, tokenizer_config: Mapping[str, Any], chat_template_file: str) -> dict[str, str]:
    """--chat-template wins over chat_template.jinja, which wins over tokenizer_config.json."""
    if chat_template_file:
        path = Path(chat_template_file)
        if not path.is_file():
            raise CheckpointError(f"--chat-template {path} does not exist", field="chat_template")
        return {"default": _read_text(path)}
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": _read_text(path)}
    value = tokenizer_config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {}


def _eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    name = "generation_config.json" if generation_config.get("eos_token_id") is not None else "config.json"
    value = (generation_config if name == "generation_config.json" else config).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}", field="model"
        )
    return tuple(ids)


def _sampling_defaults(generation_config: Mapping[str, Any], path: Path) -> dict[str, float]:
    defaults: dict[str, float] = {}
    for key in SAMPLING_KEYS:
        value = generation_config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{path}: {key} must be a number, got {value!r}", field="model")
        defaults[key] = value
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0  # the checkpoint asks for greedy decoding
    return defaults
