"""Modules as the program imports them: how long that takes, and what is to be done once one is there.

A finder in front of the others answers no import itself. It has the loader of a module that is watched, or that the
program imports at top level, tell when it has executed the module.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from restart_trace.clock import now_ns

logger = logging.getLogger(__name__)


class ImportWatcher:
    """A finder of sys.meta_path. `watched`: name of a module -> what are called with it once it is imported.

    `began` is called with the name of a module of `announced` before it is imported; `imported` with the times (ns) of
    an import that no other import caused.
    """

    def __init__(
        self,
        watched: Mapping[str, Sequence[Callable[[ModuleType], None]]],
        announced: frozenset[str],
        began: Callable[[], None],
        imported: Callable[[int, int], None],
    ) -> None:
        self._watched = watched
        self._announced = announced
        self._began = began
        self._imported = imported
        self._thread = threading.get_ident()
        self._outermost: str | None = None  # the module that the program itself is importing
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._looking or threading.get_ident() != self._thread:
            return None
        first = self._outermost is None
        if not first and name not in self._watched and name not in self._announced:
            return None
        start_ns = now_ns()
        self._looking = True  # what is imported meanwhile is not the program's import
        try:
            if name in self._announced:
                self._guarded(self._began)
            spec = _find_among_others(self, name, path, target)
        finally:
            self._looking = False
        if spec is not None and hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "__dict__"):
            self._watch(spec.loader, name, start_ns, first)
        return spec

    def imported_already(self, module: ModuleType) -> None:
        """Do what is to be done with a module once it is imported."""
        for action in self._watched.get(module.__name__, ()):
            self._guarded(partial(action, module))

    def _watch(self, loader: Any, name: str, start_ns: int, first: bool) -> None:
        """Have this one loader, which is of this one module, tell when it is done."""
        if isinstance(loader, type):  # built-in and frozen modules share theirs, and take no time
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the class's own again
            if first:
                self._outermost = name
            try:
                execute(module)
            finally:
                if first:
                    self._outermost = None
                    end_ns = now_ns()
                    self._guarded(lambda: self._imported(start_ns, end_ns))
            self.imported_already(module)

        loader.exec_module = exec_module

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as exc:
            logger.error("restart_trace: %s: %s; nothing of that is traced", type(exc).__name__, exc)


def _find_among_others(
    watcher: ImportWatcher, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    """What the finders behind `watcher` find."""
    for finder in sys.meta_path:
        if finder is watcher or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
