"""Hooks of compilers in a start-up: extensions that are built when they are needed, and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from restart_trace.clock import now_ns
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.session import Session


def hook_extensions(session: Session, module: ModuleType) -> None:
    """Hook torch.utils.cpp_extension, with which DeepSpeed builds its operators, too. It keeps what it has built in
    TORCH_EXTENSIONS_DIR; to find and import that is in the phase as well."""

    @contextmanager
    def build(call: Call) -> Iterator[None]:
        with session.compiling():
            yield

    wrap(module, "load", build)
    wrap(module, "load_inline", build)


def hook_graphs(session: Session, module: ModuleType) -> None:
    """Hook torch._dynamo.convert_frame: tracing and compiling a frame, kept in TORCHINDUCTOR_CACHE_DIR."""

    @contextmanager
    def compile_frame(call: Call) -> Iterator[None]:
        with session.compiling():
            yield

    wrap(module, "_compile", compile_frame)


def hook_backward_graphs(session: Session, module: ModuleType) -> None:
    """Hook torch._dynamo.callback, which is told when the graph of a backward pass is compiled: in the first such pass,
    which on a CUDA device is on a thread of autograd. Versions of torch without it compile that graph with the forward
    pass. It is told of the first and the last of compilations that overlap, so of these some are not recorded."""
    begun: list[int] = []  # ns

    def is_backward(call: Call) -> bool:
        return call.arguments()["args"].callback_trigger is module.CallbackTrigger.LAZY_BACKWARD

    @contextmanager
    def begin(call: Call) -> Iterator[None]:
        begun[:] = [now_ns()] if is_backward(call) else []
        yield

    @contextmanager
    def end(call: Call) -> Iterator[None]:
        if begun and is_backward(call):
            session.compiled_backward(begun.pop(), now_ns())
        yield

    if hasattr(module, "CompilationCallbackHandler") and hasattr(module, "CallbackTrigger"):
        wrap(module.CompilationCallbackHandler, "run_start_callbacks", begin)
        wrap(module.CompilationCallbackHandler, "run_end_callbacks", end)
