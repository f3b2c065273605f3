"""A process that preloads as megatron.launch does, and prints what it asked of devices and which programs it started.

Its arguments are those of the script. Prints JSON: `asked`, functions of torch that ask or initialise a device, each
with the module that called it; `started`, commands; `engines`, packages of checkpoint engines that it has imported
besides those that it always imports. What forked children do is not in it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CUDA = (
    "is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties",
    "get_device_capability", "get_device_name", "set_device", "current_stream", "mem_get_info", "is_bf16_supported",
)  # fmt: skip
ACCELERATOR = ("is_available", "device_count", "current_device_index", "synchronize")
OTHERS = "dcp", "fastpersist", "torchsnapshot"
asked: list[tuple[str, str]] = []
started: list[str] = []


def record(module: Any, name: str) -> None:
    function: Callable[..., Any] = getattr(module, name)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "?")
        # Triton, of builds for CUDA, asks as it is imported: torch answers without the driver if no device is visible.
        sees_none = caller.startswith("triton.") and os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if not caller.startswith("torch.") and caller != __name__ and not sees_none:  # torch's own ask in turn
            asked.append((f"{module.__name__}.{name}", caller))
        return function(*args, **kwargs)

    setattr(module, name, recorded)


def note_programs(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"):
        started.append(str(args[1] if event == "subprocess.Popen" else args[0]))


def main() -> None:
    for name in CUDA:
        record(torch.cuda, name)
    for name in dir(torch._C):
        if name.startswith("_cuda_") and callable(getattr(torch._C, name)):
            record(torch._C, name)
    for name in ACCELERATOR:
        if hasattr(torch.accelerator, name):
            record(torch.accelerator, name)
    sys.addaudithook(note_programs)
    from megatron.launch.cli import parse_arguments
    from megatron.launch.preload import preload

    Path("script.py").touch()
    preload(parse_arguments(["--nproc-per-node", "2", "script.py", *sys.argv[1:]]), 0)
    engines = [name for name in OTHERS if f"megatron.checkpointing.engines.{name}.engine" in sys.modules]
    print(json.dumps({"asked": asked, "started": started, "engines": engines}))


if __name__ == "__main__":
    main()
