"""Hooks of compilers in a start-up: extensions that are built when they are needed, and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

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
