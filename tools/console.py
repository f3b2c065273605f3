"""Console scripts of the commands that import megatron: ours, whatever is called so on the path.

A job's PYTHONPATH comes before site-packages, and often names a checkout of Megatron-LM. The commands' own child
processes start in the directory of this project, or get its path first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def plan() -> int:
    """`ckpt-plan`."""
    return _run(".ckpt_plan.cli")


def replay() -> int:
    """`ckpt-replay`."""
    return _run(".ckpt_replay.cli")


def drill() -> int:
    """`restart-drill`."""
    return _run(".restart_drill.cli")


def sweep() -> int:
    """`restart-sweep`."""
    return _run(".restart_sweep.cli")


def launch() -> int:
    """`restart-launch`."""
    return _run("megatron.launch.cli")


def hf_convert() -> int:
    """`hf-convert`."""
    return _run(".hf_convert")


def preprocess_data() -> int:
    """`megatron-preprocess-data`."""
    return _run(".preprocess_data")


def _run(module: str) -> int:
    """Call `main()` of `module`, with `megatron` bound to the package that was installed with this one."""
    spec = PathFinder.find_spec("megatron", [str(Path(__file__).resolve().parents[1])])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["megatron"] = package
    spec.loader.exec_module(package)
    return importlib.import_module(module, __package__).main()
