"""Every test in this directory is marked gpu, and runs in the part `tests` of the tier.

A test that takes the fixture `device` also runs on a CPU; every other one is skipped where there is no CUDA device.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = os.path.join(Path(__file__).parent, "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if not str(item.path).startswith(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available() and "device" not in getattr(item, "fixturenames", ()):
            item.add_marker(no_device)


@pytest.fixture
def device() -> torch.device:
    """The CUDA device, or the CPU where there is none: for tests whose code can be rehearsed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
