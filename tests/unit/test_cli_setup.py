"""scripts/setup names what is missing, and its cure, before it downloads anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout with no .venv, as far as the script looks at it."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def fake_python(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def refused(clone: Path, **environ: str) -> str:
    result = subprocess.run(
        ["/bin/sh", str(clone / "scripts" / "setup"), "serve"],
        env={"PATH": f"{clone / 'bin'}:/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("setup: error: ")
    assert not (clone / ".venv").exists()
    return result.stderr


def test_a_wrong_python_is_named(clone: Path) -> None:
    fake_python(clone / "bin", "python3.9", "exit 1")
    message = refused(clone, PYTHON="python3.9")
    assert "PYTHON=python3.9 is not Python 3.11 or 3.12" in message


def test_no_right_python_is_named_with_its_cure(clone: Path) -> None:
    for name in ("python3.11", "python3.12", "python"):
        fake_python(clone / "bin", name, "exit 127")
    fake_python(clone / "bin", "python3", '[ "$1" = --version ] && echo "Python 3.9.18" || exit 1')
    message = refused(clone)
    assert "needs Python 3.11 or 3.12, found Python 3.9.18" in message
    assert "apt install python3.11" in message


def test_a_missing_venv_module_is_named_with_its_cure(clone: Path) -> None:
    body = 'case "$2" in *ensurepip*) exit 1 ;; *-venv*) echo python3.11-venv ;; esac; exit 0'
    fake_python(clone / "bin", "python3.11", body)
    message = refused(clone)
    assert "python3.11 has no venv module" in message
    assert "apt install python3.11-venv" in message


FAKE_PIP = """
case "$*" in
*"pip --version"*) exit 0 ;;
*"pip install"*) case "$*" in *--quiet*|*" -q"*) ;; *) echo "Collecting torch"; echo "Downloading torch (200 MB)" ;; esac
    case "$*" in *FAIL*) echo "ERROR: no network" >&2; exit 1 ;; esac ;;
esac
exit 0"""


def test_what_is_installed_is_shown_while_it_is(clone: Path) -> None:
    (clone / ".venv").mkdir()
    fake_python(clone / ".venv" / "bin", "python", FAKE_PIP)
    command = [str(clone / "scripts" / "setup"), "serve"]
    environ = {"PATH": "/usr/bin:/bin", "TORCH_INDEX": "https://an.index"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("setup: installing the pinned dependencies into .venv (some minutes")
    assert lines[1] == "setup: PyTorch from https://an.index"
    assert lines[2:4] == ["Collecting torch", "Downloading torch (200 MB)"] == lines[4:6]
    assert lines[6].startswith("setup: done")
    failing = {**environ, "TORCH_INDEX": "https://FAIL"}
    (clone / ".venv" / ".installed-serve").unlink()
    result = subprocess.run(command, env=failing, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[0] == "ERROR: no network"
    assert "its message is above" in result.stderr.splitlines()[1]


def test_nothing_is_done_where_all_is_installed(clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    fake_python(clone / ".venv" / "bin", "rorqual", "exit 0")
    wanted = subprocess.run(
        "cat pyproject.toml constraints.txt | cksum", shell=True, cwd=clone, capture_output=True, text=True, check=True
    )
    (clone / ".venv" / ".installed-serve").write_text(wanted.stdout)
    result = subprocess.run(
        [str(clone / "scripts" / "setup"), "serve"], capture_output=True, text=True, timeout=60, check=True
    )
    assert (result.stdout, result.stderr) == ("", "")
