"""Each server's logs are its own, in a folder that can be written to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rorqual.cli.app import run
from rorqual.core.errors import ConfigError
from rorqual.launch import LogDir
from rorqual.launch.logs import LogDirTakenError


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    logs = LogDir(tmp_path / "a" / "b")
    assert logs.path.is_dir()
    logs.close()
    logs.close()


def test_a_folder_is_one_servers_alone_until_it_ends(tmp_path: Path) -> None:
    first = LogDir(tmp_path / "logs")
    with pytest.raises(LogDirTakenError, match=rf"another server \(process {os.getpid()}\) .*--log-dir"):
        LogDir(tmp_path / "logs")
    second = LogDir.first_free(tmp_path / "logs")
    third = LogDir.first_free(tmp_path / "logs")
    assert [second.path.name, third.path.name] == ["logs-2", "logs-3"]
    second.close()
    first.close()
    again = LogDir.first_free(tmp_path / "logs")
    assert again.path == tmp_path / "logs"
    again.close()
    third.close()


def test_the_folder_of_a_server_that_was_killed_is_free(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        LogDir(tmp_path / "logs")
        os._exit(0)  # without closing it
    os.waitpid(child, 0)
    LogDir(tmp_path / "logs").close()


@pytest.mark.parametrize("place", ["a file", "below a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_one_line(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "logs", "read-only": tmp_path}[place]
    if place == "read-only":  # root may write whatever the mode says, so the system's answer stands in

        def refuse(path: Path, *args: object) -> int:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("rorqual.launch.logs.os.open", refuse)
    with pytest.raises(ConfigError, match=f"no logs can be written to {folder} .*: make it writable, or name another"):
        LogDir(folder)
    assert run(["up", "--port=0", "--grpc-port=0", f"--log-dir={folder}"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"no logs can be written to {folder}" in error
