"""The API fuzzed from its own OpenAPI document, before the real four processes: no answer but those it describes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOKS = ROOT / "tests" / "support" / "fuzz_hooks.py"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

FUZZ_S = int(os.environ.get("API_FUZZ_S", "25"))
"""How long to go on. `make test-api` gives it minutes, and then every keyword of every schema is tried first."""

COVERAGE_FROM_S = 120  # the systematic phase alone takes about as long


@pytest.mark.timeout(FUZZ_S * 3 + 120)
def test_no_request_brings_a_server_error(stack: Any, tmp_path: Path) -> None:
    phases = "coverage,fuzzing" if FUZZ_S >= COVERAGE_FROM_S else "fuzzing"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RORQUAL_")}
    environ |= {"SCHEMATHESIS_HOOKS": str(HOOKS), "API_FUZZ_MODEL": "tiny", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{stack.url}/openapi.json",
            f"--phases={phases}", f"--max-time={FUZZ_S}", f"--checks={CHECKS}", "--request-timeout=30",
            "--exclude-path=/metrics", "--warnings=off", "--no-color",
        ],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "No issues found" in run.stdout or "generated" in run.stdout
    # Whatever came, the chain behind still serves.
    assert httpx.get(f"{stack.url}/health").status_code == 200
    body = {"prompt": "Once", "max_tokens": 2}
    assert httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30).status_code == 200
