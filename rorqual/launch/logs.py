"""The folder for a stack's logs: made, tried, and one server's alone while that server lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from rorqual.core.errors import ConfigError

LOCK_NAME = ".lock"
MAX_SERVERS = 100
"""Folders that are tried for a server's logs, beside one another."""


class LogDirTakenError(ConfigError):
    """Another server that is running writes its logs there."""


class LogDir:
    """A folder that can be written to, locked until `close` or the end of this process."""

    def __init__(self, path: Path) -> None:
        """Makes the folder. Raises ConfigError with the cure; LogDirTakenError where another server has it."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"no logs can be written to {path} ({error.strerror or error}): make it writable, or name another folder "
                "with --log-dir",
                field="log_dir",
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
                self.close()
                raise LogDirTakenError(
                    f"another server (process {owner or 'unknown'}) writes its logs to {path}: name another folder with "
                    "--log-dir",
                    field="log_dir",
                ) from None
            # A file system without locks: as before there were any.
        with contextlib.suppress(OSError):  # a full disk is no reason not to serve
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    @classmethod
    def first_free(cls, path: Path) -> Self:
        """`path`, or where another server has that, `path` with a number: logs, logs-2, logs-3 …"""
        for candidate in itertools.islice(_numbered(path), MAX_SERVERS):
            with contextlib.suppress(LogDirTakenError):
                return cls(candidate)
        raise ConfigError(f"{MAX_SERVERS} servers have their logs beside {path}: name a folder with --log-dir")

    def close(self) -> None:
        """Another server may have it. May be called again."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")
