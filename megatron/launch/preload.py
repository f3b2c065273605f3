"""Imports everything once, into a process that can be forked: no threads, no device, no connections."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.launch.plan import Plan
from restart_trace.clock import now_ns
from restart_trace.devices import available_accelerator, built_accelerator
from restart_trace.startup import Preload


class PreloadError(RuntimeError):
    """The imports have started threads or initialised a device, so the process cannot be forked."""


def preload(plan: Plan, started_ns: int) -> Preload:
    """Import torch, DeepSpeed and megatron; returns when. `started_ns`: when this process started (monotonic, ns).

    Sets two environment variables for the ranks: DS_ACCELERATOR, if it is not set, and OMP_NUM_THREADS, as torchrun
    does. Raises PreloadError if the process cannot be forked afterwards.
    """
    if plan.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(plan.script))  # as `python SCRIPT` would have it
    began = now_ns()
    with _variables(OPENBLAS_NUM_THREADS="1"):  # NumPy's BLAS starts threads as it is loaded, by torch or by others
        import torch
    if "DS_ACCELERATOR" not in os.environ:
        kind = built_accelerator()
        there = kind is not None and _in_a_child(lambda: available_accelerator() is not None)
        os.environ["DS_ACCELERATOR"] = kind if kind is not None and there else "cpu"
    local_size = str(plan.nproc_per_node)
    # DeepSpeed and Triton look for devices as they are imported: where none is visible, torch does not ask the driver.
    with _variables(OPENBLAS_NUM_THREADS="1", LOCAL_SIZE=local_size, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES=""):
        os.environ.pop("ROCR_VISIBLE_DEVICES", None)  # which torch takes before both on ROCm
        from megatron.training.heavy_imports import import_for_forks

        import_for_forks(plan.arguments, compiler=plan.compiles)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise PreloadError(
            f"importing torch, DeepSpeed and megatron started {threads - 1} threads, which a fork would lose; "
            "use torchrun"
        )
    kind = os.environ["DS_ACCELERATOR"]
    if kind != "cpu" and _in_a_child(torch.get_device_module(kind)._is_in_bad_fork):
        raise PreloadError(
            f"a module that was imported has initialised {kind} devices, which forked ranks could not use; use torchrun"
        )
    return Preload(started_ns, began, now_ns())


def _in_a_child(question: Callable[[], bool]) -> bool:
    """What `question` answers in a forked process: torch refuses devices to the forks of one that asked the driver.

    Where NVML answers, the child asks no driver either. Raises PreloadError if the child ends without an answer.
    """
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            status = int(question())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)  # nothing of this process may run twice, such as what is registered with atexit
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, 1):
        raise PreloadError(f"a process that asked torch for devices ended with {status}, see above; use torchrun")
    return status == 1


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
