"""Keeps torch's compiler out of processes that compile nothing: over half of a restart's import time.

Building any torch optimizer imports torch._dynamo (1.8 s) to mark functions as "not to be compiled"; the first
backward pass of a pipeline imports sympy (0.7 s) to compare two shapes; one of DeepSpeed's optimizers imports
torch._inductor (1.5 s) by decorating a function with torch.compile. None of it is used here. `install` puts
substitutes in place of the first two, which answer only what torch asks during imports; any other attribute imports the
real module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

DISABLE_VARIABLE = "MEGATRON_FULL_IMPORTS"


class _StandIn(types.ModuleType):
    """Has the attributes given at construction; any other attribute imports the real module."""

    def __init__(self, name: str, answers: Mapping[str, Any], path: list[str] | None) -> None:
        super().__init__(name)
        vars(self).update(answers)
        if path is not None:
            self.__path__ = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # The import system and inspect look for these; that is no use of the module.
            raise AttributeError(name)
        return getattr(_real_module(self.__name__), name)


class _SubmoduleFinder:
    """Lets `import torch._dynamo.x` import the real package first, and x from it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        if not isinstance(sys.modules.get(parent), _StandIn):
            return None
        _real_module(parent)
        if fullname not in sys.modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, _AlreadyLoaded(sys.modules[fullname]))


class _AlreadyLoaded(importlib.abc.Loader):
    """Loader of a module that importing its package has loaded."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def _real_module(name: str) -> types.ModuleType:
    """Import the module that a stand-in stands for, and put it in its place for good."""
    if isinstance(sys.modules.get(name), _StandIn):
        del sys.modules[name]
        parent, _, attribute = name.rpartition(".")
        vars(sys.modules[parent]).pop(attribute, None)
        setattr(sys.modules[parent], attribute, importlib.import_module(name))
    return sys.modules[name]


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Any:
    """torch._dynamo.disable: nothing is compiled, so nothing has to be kept from it."""
    return fn if fn is not None else (lambda decorated: decorated)


def _nothing(*_: Any) -> None:
    """torch._dynamo.graph_break, and clearing a cache that is not there."""


def _sym_eq(x: Any, y: Any) -> bool:
    """symbolic_shapes.sym_eq of shapes that hold plain integers, as they do where nothing is traced."""
    return tuple(x) == tuple(y)


def _expect_true(a: Any, skip: int = 0) -> bool:
    """symbolic_shapes.expect_true of a plain bool."""
    return bool(a)


def install() -> None:
    """Put the stand-ins in place. Call after `import torch`.

    A module that is imported already stays as it is; MEGATRON_FULL_IMPORTS=1 leaves everything as it is.
    """
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return
    if any(isinstance(finder, _SubmoduleFinder) for finder in sys.meta_path):
        return  # they are in place, or have given way
    directory = os.path.join(os.path.dirname(sys.modules["torch"].__file__ or ""), "_dynamo")
    rules = types.SimpleNamespace(clear_lru_cache=_nothing)
    dynamo = {"disable": _disable, "graph_break": _nothing, "trace_rules": rules}
    shapes = {"sym_eq": _sym_eq, "expect_true": _expect_true}
    stand_ins = (
        _StandIn("torch._dynamo", dynamo, [directory]),
        _StandIn("torch.fx.experimental.symbolic_shapes", shapes, None),
    )
    for stand_in in stand_ins:
        sys.modules.setdefault(stand_in.__name__, stand_in)
    sys.meta_path.insert(0, _SubmoduleFinder())  # type: ignore[arg-type]


@contextmanager
def without_compile() -> Iterator[None]:
    """Within it, torch.compile leaves functions as they are: for imports that decorate with it."""
    torch: Any = sys.modules["torch"]
    original = torch.compile

    def unchanged(model: Any = None, **_: Any) -> Any:
        return model if model is not None else (lambda decorated: decorated)

    if os.environ.get(DISABLE_VARIABLE) != "1":
        torch.compile = unchanged
    try:
        yield
    finally:
        torch.compile = original
