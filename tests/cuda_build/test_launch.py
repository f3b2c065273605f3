"""megatron.launch where NVML shows a GPU: its process forks ranks, so neither it nor its imports may ask CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cuda_build.conftest import CudaHost

# What a rank finds before it uses CUDA; the process that forked it is its parent.
RANK = """
import json, os, torch
from pathlib import Path
found = {"parent": os.getppid(), "accelerator": os.environ["DS_ACCELERATOR"], "bad_fork": torch.cuda._is_in_bad_fork(),
         "counted": torch.cuda._cached_device_count, "deepspeed": "deepspeed" in vars(__import__("sys"))["modules"]}
Path(f"rank_{os.environ['RANK']}").write_text(json.dumps(found))
"""


def test_ranks_can_use_cuda_as_the_launcher_never_asked_it(cuda_host: CudaHost, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path, env=cuda_host.environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank_{rank}").read_text())
        assert cuda_host.calls().get(found.pop("parent")) is None
        assert found == {"accelerator": "cuda", "bad_fork": False, "counted": None, "deepspeed": True}
