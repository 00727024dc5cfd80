"""The arrows between the parts stay true: see docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
APPLICATIONS = ("gateway", "executor", "services/tokenizer", "services/scheduler")
APPLICATION_ROOTS = {"gateway", "executor", "services"}


def python_files(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names that `path` imports, those under TYPE_CHECKING too, with their lines; relative ones resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def offences(folder: str, forbidden: set[str]) -> list[str]:
    """Imports in `folder` whose name is one of `forbidden` or lies below it."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(folder)
        for name, line in imports(path)
        if any(name == banned or name.startswith(f"{banned}.") for banned in forbidden)
    ]


@pytest.mark.parametrize("application", APPLICATIONS)
def test_no_application_imports_another(application: str) -> None:
    own = application.replace("/", ".")
    others = {a.replace("/", ".") for a in APPLICATIONS} - {own}
    assert offences(application, others) == []


@pytest.mark.parametrize("application", APPLICATIONS)
def test_inside_an_application_imports_are_relative(application: str) -> None:
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(application)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and node.module
        and node.module.split(".")[0] in APPLICATION_ROOTS
    ]
    assert absolute == []


def test_the_library_imports_no_application() -> None:
    assert offences("rorqual", APPLICATION_ROOTS) == []


def test_the_core_is_the_standard_library_alone() -> None:
    foreign = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files("rorqual/core")
        for name, line in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("rorqual.core")
    ]
    assert foreign == []


@pytest.mark.parametrize(
    "folder", ["gateway", "services", "rorqual/client", "rorqual/cli", "rorqual/launch", "rorqual/rpc"]
)
def test_torch_stays_in_the_executor(folder: str) -> None:
    assert offences(folder, {"torch", "safetensors", "transformers", "rorqual.kernels"}) == []


@pytest.mark.parametrize("folder", ["rorqual/client", "rorqual/cli", "rorqual/launch"])
def test_the_client_needs_only_what_the_bare_wheel_installs(folder: str) -> None:
    allowed = sys.stdlib_module_names | {"rorqual", "grpc", "google", "grpc_status", "typer", "rich"}
    served_only = {"rorqual.telemetry", "rorqual.rpc.server"}
    foreign = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(folder)
        for name, line in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert foreign + offences(folder, served_only) == []


def test_the_walk_sees_imports_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above are worth what this finds."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "services" / "scheduler" / "bad.py"
    module.parent.mkdir(parents=True)
    module.write_text("import torch.nn\nfrom ..tokenizer import decoder\ndef f():\n    from gateway import app\n")
    assert {name for name, _ in imports(module)} == {"torch.nn", "services.tokenizer.decoder", "gateway.app"}
    assert len(offences("services/scheduler", {"torch", "services.tokenizer", "gateway"})) == 3
