"""What the tier runs on, as a JSON file: device, driver, libraries, and which engines can save here."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.parts import ENGINES, ROOT
from tools.common.machine import filesystem_of, machine

_PACKAGES = ("torch", "deepspeed", "numpy", "triton", "torchsnapshot", "apex", "nvidia-ml-py")
_ASKED = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,persistence_mode"


def described() -> dict[str, Any]:
    """All of it. Imports torch and every engine."""
    from megatron.startup.initialize import import_heavy

    import_heavy()
    import torch
    from torch.cuda import nccl

    from tools.ckpt_replay.prepare import unavailable_engines

    found: dict[str, Any] = machine() | {"filesystem": filesystem_of(ROOT), "free_bytes": shutil.disk_usage(ROOT).free}
    found["memory_bytes"] = _memory_bytes()
    found["packages"] = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    found["cuda"] = torch.version.cuda
    found["engine_problems"] = unavailable_engines(ENGINES)
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
        found["nccl"] = ".".join(map(str, nccl.version()))
        found["nvidia_smi"] = _nvidia_smi()
    else:
        found |= {"device": "CPU", "nccl": None, "nvidia_smi": None}
    return found


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _nvidia_smi() -> dict[str, str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    values = done.stdout.splitlines()[:1]
    return dict(zip(_ASKED.split(","), map(str.strip, values[0].split(",")), strict=True)) if values else None


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(described(), indent=1) + "\n")
