"""Imported at start by a Python with this directory on PYTHONPATH: DeepSpeed comes without torch's compiler, as it does
in our own ranks. For scripts whose imports are not what a test is about: they take less than half of the time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FOR_GOOD = contextlib.ExitStack()


class LeanFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "deepspeed":
            sys.meta_path.remove(self)
            import torch  # noqa: F401

            from megatron.startup import lean_imports

            lean_imports.install()
            FOR_GOOD.enter_context(lean_imports.without_compile())  # one of DeepSpeed's modules comes later
        return None


sys.meta_path.insert(0, LeanFinder())
