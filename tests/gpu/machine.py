"""What the tier runs on, as a JSON file: device, driver, libraries, and which engines can save here."""

from __future__ import annotations

import contextlib
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.facts import NotObservedError, nvidia_smi
from tests.gpu.files import write_json
from tests.gpu.parts import ENGINES, ROOT
from tools.common.machine import filesystem_of, machine

_PACKAGES = ("torch", "deepspeed", "numpy", "triton", "torchsnapshot", "apex", "nvidia-ml-py")


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


def _nvidia_smi() -> dict[str, str | None] | None:
    """Of the first device; None if nvidia-smi tells nothing."""
    with contextlib.suppress(NotObservedError):
        return nvidia_smi()[0]
    return None


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), described())
