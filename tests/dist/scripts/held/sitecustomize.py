"""Imported at start by a Python with this directory on PYTHONPATH: lets tests/dist/hold.py patch the trainer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TRAINING = "megatron.training.trainer"


class PatchingFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != TRAINING:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            from tests.dist.hold import patch

            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, PatchingFinder())
