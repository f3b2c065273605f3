"""megatron.launch with a CUDA build: its process forks ranks, so neither it nor what it imports may ask CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_build.conftest import ROOT, CudaHost

RECORDED = ROOT / "tests" / "unit" / "megatron" / "launch" / "recorded_preload.py"
# What a rank finds before it uses CUDA; the process that forked it is its parent.
RANK = """
import json, os, sys, torch, torch.utils._triton
from pathlib import Path
found = {"parent": os.getppid(), "accelerator": os.environ["DS_ACCELERATOR"], "bad_fork": torch.cuda._is_in_bad_fork(),
         "imported": "deepspeed" in sys.modules, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
         "triton_was_asked": torch.utils._triton.has_triton.cache_info().currsize > 0}
Path(f"rank_{os.environ['RANK']}").write_text(json.dumps(found))
"""


def launch(host: CudaHost, directory: Path, *flags: str, **settings: str) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text(RANK)
    return subprocess.run(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "script.py", *flags],
        cwd=directory, env=host.environment | settings, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def ranks_of_a_launch(host: CudaHost, directory: Path, *flags: str, **settings: str) -> dict[str, object]:
    """What both ranks found, if they found the same, and their launcher has not called the driver."""
    done = launch(host, directory, *flags, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((directory / f"rank_{rank}").read_text()) for rank in range(2))
    assert first == second
    assert host.calls().get(first.pop("parent")) is None
    return first


USABLE = {"accelerator": "cuda", "bad_fork": False, "imported": True, "visible": None, "triton_was_asked": False}
FLAGS = pytest.mark.parametrize("flags", [[], ["--torch-compile"]], ids=["", "compiler"])


@FLAGS
def test_ranks_can_use_cuda_as_the_launcher_never_asked_it(
    cuda_host: CudaHost, tmp_path: Path, flags: list[str]
) -> None:
    assert ranks_of_a_launch(cuda_host, tmp_path, *flags) == USABLE
    assert cuda_host.calls() == {}, "NVML has answered"


def test_where_nvml_is_missing_a_process_of_its_own_asks_the_driver(cuda_host: CudaHost, tmp_path: Path) -> None:
    """As where devices have MIG names, which torch does not count by NVML. The stand-in for the driver has none."""
    cuda_host.remove_nvml()
    assert ranks_of_a_launch(cuda_host, tmp_path) == USABLE | {"accelerator": "cpu"}
    assert [calls["cuInit"] for calls in cuda_host.calls().values()] == [1]


def test_nobody_is_asked_where_the_user_has_decided(cuda_host: CudaHost, tmp_path: Path) -> None:
    cuda_host.remove_nvml()
    assert ranks_of_a_launch(cuda_host, tmp_path, DS_ACCELERATOR="cuda") == USABLE
    assert cuda_host.calls() == {}


def test_a_launcher_whose_cuda_somebody_initialised_says_so_once(cuda_host: CudaHost, tmp_path: Path) -> None:
    """As a site's own start-up module may; on CPUs it does no harm."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch._C._cuda_getDeviceCount()\n")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
    done = launch(cuda_host, tmp_path, DS_ACCELERATOR="cuda", **path)
    assert (done.returncode, list(tmp_path.glob("rank_*"))) == (2, []), done.stderr
    assert done.stderr == (
        "[launch] error: a module that was imported has initialised cuda devices, which forked ranks could not use; "
        "use torchrun\n"
    )
    assert launch(cuda_host, tmp_path, DS_ACCELERATOR="cpu", **path).returncode == 0


@FLAGS
def test_imports_ask_nothing_of_torch_and_start_no_program(
    cuda_host: CudaHost, tmp_path: Path, flags: list[str]
) -> None:
    """Triton does ask, while no device is visible, which torch answers by itself."""
    done = subprocess.run(
        [sys.executable, str(RECORDED), *flags], cwd=tmp_path,
        env=cuda_host.environment | {"OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [ask for ask in found["asked"] if not ask[1].startswith("triton.")] == []
    assert found["started"] == [] and cuda_host.calls() == {}
