"""The safetensors files of a checkpoint: their headers checked, their tensors read one by one."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rorqual.core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD = re.compile(r"model-(?P<number>\d{5})-of-(?P<of>\d{5})\.safetensors")
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
               "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what its header says."""

    name: str
    file: Path
    dtype: str  # safetensors' name: BF16, F32, F8_E4M3 …
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int

    @property
    def end(self) -> int:
        """The file's byte after its last one."""
        return self.offset + self.num_bytes


class CheckpointFiles:
    """All tensors of a checkpoint folder by name. Use as a context manager; `read` maps files as it needs them.

    Opening reads the index and every file's header, nothing else. Raises CheckpointError, naming file and
    tensor, for a missing shard, a file cut short, a header that does not fit its file, an index that disagrees, a name
    that stands twice, or a file outside the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: not a folder; --model names a folder with config.json and weights.")
        self.tensors: dict[str, TensorInfo] = {}
        self.headers: dict[Path, bytes] = {}
        self._open_files: dict[Path, Any] = {}
        index = self.path / INDEX_NAME
        if index.exists():
            self._read_sharded(index)
        elif (self.path / SINGLE_NAME).exists():
            self._require_inside(self.path / SINGLE_NAME)
            for info in self._read_header(self.path / SINGLE_NAME).values():
                self.tensors[info.name] = info
        else:
            self._refuse_shards_without_index()
            found = ", ".join(sorted(p.name for p in self.path.iterdir())[:8]) or "nothing"
            raise CheckpointError(
                f"{self.path}: holds neither {INDEX_NAME} nor {SINGLE_NAME} (found: {found}); "
                "download the weights, or convert them to safetensors."
            )

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.clear()

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        return sorted(self.headers)

    def place_of(self, name: str) -> str:
        """Where a tensor that is not there should be, for a person: a file, as far as it can be told."""
        if len(self.headers) == 1:
            return f"is not in {self.files[0]}"
        for prefix in (name.rpartition(".")[0], ".".join(name.split(".")[:3])):
            beside = {info.file.name for other, info in self.tensors.items() if other.startswith(f"{prefix}.")}
            if prefix and beside:
                return (
                    f"is not listed in {self.path / INDEX_NAME}; other tensors of {prefix} are in "
                    f"{', '.join(sorted(beside))}"
                )
        return f"is not listed in {self.path / INDEX_NAME}"

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, as stored."""
        info = self.tensors[name]
        try:
            if info.file not in self._open_files:
                self._open_files[info.file] = safe_open(info.file, framework="pt")
            tensor: torch.Tensor = self._open_files[info.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} cannot be read ({error}); download the file again."
            ) from error
        return tensor

    def _refuse_shards_without_index(self) -> None:
        shards = [match for path in self.path.iterdir() if (match := _SHARD.fullmatch(path.name))]
        if not shards:
            return
        there = {int(shard["number"]) for shard in shards}
        of = max(int(shard["of"]) for shard in shards)
        absent = [f"model-{number:05d}-of-{of:05d}.safetensors" for number in range(1, of + 1) if number not in there]
        raise CheckpointError(
            f"{self.path / INDEX_NAME}: missing, though {len(shards)} of {of} numbered files are there"
            f"{', without ' + absent[0] if absent else ''}; download the missing files."
        )

    def _read_sharded(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique)["weight_map"]
        except _NamedTwiceError as error:
            raise CheckpointError(f"{index}: names {error.name!r} twice; download it again.") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{index}: is not an index with a weight_map ({error!r}); download it again."
            ) from error
        if not isinstance(weight_map, Mapping) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map does not map tensor names to file names; download it again.")
        wanted_by: dict[str, str] = {}
        for name, file_name in weight_map.items():
            wanted_by.setdefault(file_name, name)
        for file_name, name in wanted_by.items():
            # Its folder is somebody's download: it may not make this process read the machine's other files.
            if Path(file_name).name != file_name or file_name in ("", ".", ".."):
                raise CheckpointError(
                    f"{index}: says that tensor {name!r} is in {file_name!r}, which is not the name of a file in this "
                    "folder; an index names the files beside it: download it again, or put the file there and "
                    "correct the index."
                )
            self._require_inside(self.path / file_name)
        missing = [name for name in sorted(wanted_by) if not (self.path / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path / missing[0]}: missing, though {INDEX_NAME} names it for tensor "
                f"{wanted_by[missing[0]]!r} ({len(missing)} of {len(wanted_by)} files are missing); "
                "download the missing files."
            )
        headers = {name: self._read_header(self.path / name) for name in sorted(wanted_by)}
        for name, file_name in weight_map.items():
            info = headers[file_name].pop(name, None)
            if info is None:
                raise CheckpointError(
                    f"{self.path / file_name}: does not hold tensor {name!r}, though {INDEX_NAME} says so; "
                    "index and files are of different downloads: download both again."
                )
            self.tensors[name] = info
        for file_name, rest in headers.items():
            for name in rest:
                raise CheckpointError(
                    f"{self.path / file_name}: holds tensor {name!r}, which {INDEX_NAME} does not list there; "
                    "index and files are of different downloads: download both again."
                )

    def _require_inside(self, file: Path) -> None:
        """Refuse a link that leads out of the folder, but for those of a Hugging Face cache (to its `blobs`)."""
        target = file.resolve()
        folder = target.parent
        is_cached = folder.name == "blobs" and folder.parent.name.startswith("models--")
        if not target.is_relative_to(self.path.resolve()) and not is_cached:
            raise CheckpointError(
                f"{file}: is a link out of the folder, to {target}; name the folder of the file itself with --model, "
                "or put the file (a hard link will do) in the link's place."
            )

    def _read_header(self, file: Path) -> dict[str, TensorInfo]:
        again = "the file is cut short or damaged: download it again."
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                prefix = stream.read(8)
                if len(prefix) < 8:
                    raise CheckpointError(f"{file}: {size} bytes hold no safetensors header; {again}")
                (length,) = struct.unpack("<Q", prefix)
                if length > MAX_HEADER_BYTES or 8 + length > size:
                    raise CheckpointError(f"{file}: the header claims {length} bytes and the file has {size}; {again}")
                raw = stream.read(length)
            header = json.loads(raw, object_pairs_hook=_unique)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error}).") from error
        except _NamedTwiceError as error:
            raise CheckpointError(
                f"{file}: the header names {error.name!r} twice, and which one is meant cannot be known; {again}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: the header is not JSON ({error}); {again}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{file}: the header holds {type(header).__name__}, not an object; {again}")
        data_bytes = size - 8 - length
        tensors: dict[str, TensorInfo] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
                begin, end = (int(n) for n in entry["data_offsets"])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file}: header entry of tensor {name!r} is malformed; {again}") from error
            if dtype not in DTYPE_BYTES:
                raise CheckpointError(f"{file}: tensor {name!r} has dtype {dtype}, which is not supported.")
            if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
                raise CheckpointError(
                    f"{file}: tensor {name!r} of shape {list(shape)} and dtype {dtype} is given {end - begin} bytes; "
                    + again
                )
            if not 0 <= begin <= end <= data_bytes:
                raise CheckpointError(
                    f"{file}: tensor {name!r} ends at byte {8 + length + end} and the file has {size}; {again}"
                )
            tensors[name] = TensorInfo(name, file, dtype, shape, 8 + length + begin, end - begin)
        self._check_offsets(file, tensors.values(), 8 + length, again)
        if not_named := size - max((info.end for info in tensors.values()), default=8 + length):
            raise CheckpointError(f"{file}: {not_named} bytes follow the last tensor; {again}")
        self.headers[file] = raw
        return tensors

    @staticmethod
    def _check_offsets(file: Path, tensors: Iterable[TensorInfo], start: int, again: str) -> None:
        """Each byte belongs to one tensor, as the format demands."""
        before, end = "", start
        for info in sorted(tensors, key=lambda info: (info.offset, info.end)):
            if info.offset < end:
                raise CheckpointError(f"{file}: tensors {before!r} and {info.name!r} share bytes; {again}")
            if info.offset > end:
                raise CheckpointError(
                    f"{file}: {info.offset - end} bytes before tensor {info.name!r} belong to none; {again}"
                )
            before, end = info.name, info.end


class _NamedTwiceError(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name stands twice (json.loads would keep the last)."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _NamedTwiceError(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """Refuse a tokenizer whose ids do not fit the embedding. A folder without tokenizer.json passes."""
    file = path / "tokenizer.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error}); download it again.") from error
    ids: dict[str, int] = {}
    try:
        vocab = raw["model"]["vocab"]
        if isinstance(vocab, dict):
            ids.update({token: int(token_id) for token, token_id in vocab.items()})
        ids.update({token["content"]: int(token["id"]) for token in raw.get("added_tokens") or ()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: is no tokenizer with a model.vocab and added_tokens ({error!r}); download it again."
        ) from error
    if not ids:
        return
    token, largest = max(ids.items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise CheckpointError(
            f"{file}: token {token!r} has id {largest}, but config.json's vocab_size and the tensor "
            f"'model.embed_tokens.weight' have room for {vocab_size}; tokenizer and weights are of different models."
        )
