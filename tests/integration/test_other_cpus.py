"""What compares tokens holds on a CPU with AVX2 alone, too: a chosen few run again in a process that sees no more.

The processes that a stack starts inherit the two variables, so that its executor computes for AVX2 as well.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

AGAINST_TRANSFORMERS = [
    "tests/golden/test_float32.py::test_whole_prompt[v2-lite-greedy]",
    "tests/golden/test_float32.py::test_sequences_join_and_leave[v2-lite-greedy]",
    "tests/golden/test_float32.py::test_whole_prompt[v3-qlora-groups-yarn]",
    "tests/golden/test_bfloat16.py::test_served_tokens",
]
EQUAL_STEPS = [  # both dtypes each
    "tests/unit/test_model_deterministic.py::test_chunks",
    "tests/unit/test_model_deterministic.py::test_computed_again",
    "tests/unit/test_model_deterministic.py::test_cached_prefix",
]
EQUAL_ANSWERS = [  # of --deterministic servers in both dtypes
    "tests/integration/test_stack_serving.py::test_without_a_stream_the_answer_is_the_same_text",
]


@pytest.mark.parametrize(
    ("tests", "at_least"),
    [(AGAINST_TRANSFORMERS + EQUAL_STEPS, 20), (EQUAL_ANSWERS, 2)],
    ids=["the model", "served"],
)
def test_on_avx2(tests: Sequence[str], at_least: int, tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("AVX2 is x86's")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.support.cpu_kind"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inner'}", *tests],
        cwd=ROOT,
        env={**plain, **AVX2},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch computed for AVX2" in done.stdout
    passed = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)  # and none skipped
    assert passed is not None, done.stdout
    assert int(passed[1]) >= at_least
