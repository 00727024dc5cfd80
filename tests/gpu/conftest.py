"""What every kernel test runs on: a Hopper GPU and the compiled library; without them the tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rorqual.kernels.loader import DEFAULT_PATH, KernelLibrary, load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    # Oracles compute on the CPU: workers that each take all cores take minutes for what one does in seconds.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def library(device: torch.device) -> KernelLibrary:
    if not DEFAULT_PATH.is_file():
        pytest.skip("needs the compiled kernels: make kernels")
    return load()


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
