"""The hook of Triton's compiler: kernels that a program compiles for itself, in torch.compile or without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from restart_trace.clock import now_ns
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.session import Session


def hook(session: Session, module: ModuleType) -> None:
    """Hook triton.compiler, from which functions of triton.jit take the compiler when they first run, and from which
    triton.compile is. It keeps kernels in TRITON_CACHE_DIR; to find one there is in the phase as well."""

    @contextmanager
    def compile_kernel(call: Call) -> Iterator[None]:
        if session.is_training_thread():
            with session.compiling():
                yield
            return
        begun_ns = now_ns()  # on a CUDA device a thread of autograd runs the kernels of a backward pass
        yield
        session.compiled_backward(begun_ns, now_ns())

    wrap(module, "compile", compile_kernel)
