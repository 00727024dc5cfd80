"""The compiled library is refused with a reason when it is missing, foreign or of another ABI."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rorqual.kernels import abi
from rorqual.kernels.loader import ABI_VERSION, KernelCallError, KernelLibrary, KernelLibraryError

ROOT = Path(__file__).resolve().parents[2]
ABI_HEADER = ROOT / "csrc" / "include" / "rorqual" / "abi.h"
CC = shutil.which("cc") or shutil.which("gcc")

needs_compiler = pytest.mark.skipif(CC is None, reason="needs a C compiler")


def compile_library(tmp_path: Path, source: str) -> Path:
    assert CC is not None
    code, library = tmp_path / "library.c", tmp_path / "library.so"
    code.write_text(source)
    subprocess.run([CC, "-shared", "-fPIC", "-o", library, code], check=True)
    return library


def test_a_missing_library_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(KernelLibraryError, match=r"make kernels.*--device cpu") as caught:
        KernelLibrary(tmp_path / "none.so")
    assert caught.value.reason == "KERNELS_UNAVAILABLE"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a shared object")
    with pytest.raises(KernelLibraryError, match="is not a library of Rorqual's kernels"):
        KernelLibrary(path)


@needs_compiler
def test_a_foreign_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelLibraryError, match="rorqual_abi_version"):
        KernelLibrary(compile_library(tmp_path, "int something_else(void) { return 0; }"))


@needs_compiler
def test_another_abi_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    library = compile_library(tmp_path, f"int rorqual_abi_version(void) {{ return {ABI_VERSION + 1}; }}")
    with pytest.raises(KernelLibraryError, match=f"ABI version {ABI_VERSION + 1}.*needs {ABI_VERSION}") as caught:
        KernelLibrary(library)
    assert caught.value.metadata["found"] == str(ABI_VERSION + 1)


@needs_compiler
def test_a_failing_call_carries_the_library_s_text(tmp_path: Path) -> None:
    path = compile_library(
        tmp_path,
        f"""
        int rorqual_abi_version(void) {{ return {ABI_VERSION}; }}
        const char* rorqual_last_error(void) {{ return "hidden must be a multiple of 8, got 9"; }}
        int rorqual_refuses(const void* args, void* stream) {{ return -1; }}
        int rorqual_breaks(const void* args, void* stream) {{ return 700; }}
        int rorqual_works(const void* args, void* stream) {{ return stream == (void*)42 ? 0 : -1; }}
        """,
    )
    library = KernelLibrary(path)
    args = abi.RmsNormArgs()
    library.call("rorqual_works", args, 42)
    with pytest.raises(KernelCallError, match="rorqual_refuses refused its arguments: hidden must be"):
        library.call("rorqual_refuses", args, 0)
    with pytest.raises(KernelCallError, match="rorqual_breaks failed with CUDA error 700"):
        library.call("rorqual_breaks", args, 0)


def test_the_loader_knows_the_header_s_version() -> None:
    match = re.search(r"#define RORQUAL_ABI_VERSION (\d+)", ABI_HEADER.read_text())
    assert match is not None
    assert int(match[1]) == ABI_VERSION


@needs_compiler
@pytest.mark.parametrize(
    ("c_name", "struct"),
    [
        ("RorqualRmsNorm", abi.RmsNormArgs),
        ("RorqualMlaStore", abi.MlaStoreArgs),
        ("RorqualMlaPlan", abi.MlaPlanArgs),
        ("RorqualMlaDecode", abi.MlaDecodeArgs),
        ("RorqualMoeRoute", abi.MoeRouteArgs),
        ("RorqualMoePermute", abi.MoePermuteArgs),
        ("RorqualGemm", abi.GemmArgs),
        ("RorqualLaunch", abi.Launch),
        ("RorqualOwnPointer", abi.OwnPointer),
        ("RorqualRunLayers", abi.RunLayersArgs),
        ("RorqualStreamWait", abi.StreamWaitArgs),
    ],
)
def test_structs_lie_as_in_the_header(tmp_path: Path, c_name: str, struct: type[ctypes.Structure]) -> None:
    """Name by name, offset by offset, as the C compiler sees them."""
    names = [field[0] for field in struct._fields_]
    offsets = ", ".join(f"(int)offsetof({c_name}, {name})" for name in names)
    path = compile_library(
        tmp_path,
        f'#include <stddef.h>\n#include "{ABI_HEADER}"\nint offsets[] = {{ {offsets}, (int)sizeof({c_name}) }};',
    )
    got = list((ctypes.c_int * (len(names) + 1)).in_dll(ctypes.CDLL(str(path)), "offsets"))
    assert got == [*(getattr(struct, name).offset for name in names), ctypes.sizeof(struct)]
