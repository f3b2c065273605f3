"""Imports everything once, into a process that can be forked: no threads, no CUDA, no connections."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.launch.plan import Plan
from restart_trace.clock import now_ns
from restart_trace.startup import Preload


class PreloadError(RuntimeError):
    """The imports have started threads or initialised CUDA, so the process cannot be forked."""


def preload(plan: Plan, started_ns: int) -> Preload:
    """Import torch, DeepSpeed and megatron; returns when. `started_ns`: when this process started (monotonic, ns).

    Sets two environment variables for the ranks: DS_ACCELERATOR, which DeepSpeed has chosen by then, and
    OMP_NUM_THREADS, as torchrun does. Raises PreloadError if the process cannot be forked afterwards.
    """
    if plan.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(plan.script))  # as `python SCRIPT` would have it
    began = now_ns()
    with _variables(OPENBLAS_NUM_THREADS="1"):  # NumPy's BLAS starts threads as it is loaded, by torch or by others
        import torch
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if _sees_cuda() else "cpu")
    local_size = str(plan.nproc_per_node)
    # DeepSpeed asks devices for their properties as it is imported, which would initialise CUDA.
    with _variables(OPENBLAS_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", LOCAL_SIZE=local_size):
        from megatron.training.heavy_imports import import_for_forks

        import_for_forks()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise PreloadError(
            f"importing torch, DeepSpeed and megatron started {threads - 1} threads, which a fork would lose; "
            "use torchrun"
        )
    if torch.cuda.is_initialized():
        raise PreloadError("importing DeepSpeed has initialised CUDA, which cannot be forked; use torchrun")
    return Preload(started_ns, began, now_ns())


def _sees_cuda() -> bool:
    """Whether there is a CUDA device, as NVML says: asking CUDA itself would initialise it."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return torch.backends.cuda.is_built()  # of these devices torch asks CUDA in spite of the variable
    with _variables(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


@contextlib.contextmanager
def _variables(**values: str) -> Iterator[None]:
    """Set environment variables, and restore the whole environment afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
