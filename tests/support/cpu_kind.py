"""A pytest plugin (-p tests.support.cpu_kind) that says at the end which instructions torch's kernels were for."""

from __future__ import annotations

from typing import Any

import torch


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"torch computed for {torch.backends.cpu.get_cpu_capability()}")
