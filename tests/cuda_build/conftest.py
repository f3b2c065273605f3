"""These tests need a CUDA build of torch. pyproject.toml keeps them out of the suite, whose torch is built for CPUs."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class CudaHost:
    """The environment of a host with one GPU, as far as CUDA and NVML can be stood in for, and what asked CUDA."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "calls"
        for name in ("libcuda", "libnvidia-ml"):
            source = HERE / f"{name.replace('-', '_')}_stand_in.c"
            built = directory / f"{name}.so.1"
            subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", built, source], check=True)
        unset = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS")
        self.environment = {name: value for name, value in os.environ.items() if name not in unset} | {
            "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(directory), "CUDA_STAND_IN_LOG": str(self._log),
        }  # fmt: skip

    def remove_nvml(self) -> None:
        (self._directory / "libnvidia-ml.so.1").unlink()

    def calls(self) -> dict[int, Counter[str]]:
        """How often each process that loaded the driver has called each of its functions, by process id."""
        found: dict[int, Counter[str]] = {}
        for line in self._log.read_text().splitlines() if self._log.exists() else []:
            process, function = line.split(" ", 1)
            found.setdefault(int(process), Counter())[function] += 1
        return found


def pytest_configure() -> None:
    import torch

    if torch.version.cuda is None:
        raise pytest.UsageError(
            f"torch {torch.__version__} is no CUDA build, which tests/cuda_build needs; run: bash tests/cuda_build.sh"
        )


@pytest.fixture
def cuda_host(tmp_path_factory: pytest.TempPathFactory) -> CudaHost:
    return CudaHost(tmp_path_factory.mktemp("driver"))
