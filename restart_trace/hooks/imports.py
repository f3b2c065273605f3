"""Watches the program's imports: measures their time, and runs actions once a module is imported.

A finder in front of the other finders resolves no import itself. It wraps the loader of a module that is watched, or
that the program imports at top level, so that it learns when the module has been executed.
"""

from __future__ import annotations

import sys
import time
from _thread import get_ident

TYPE_CHECKING = False  # that of `typing`, which takes as long to import as Python to start
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class ImportWatcher:
    """A finder for sys.meta_path. `watched`: name of a module -> functions that are called with it once it is imported.

    `began` is called before a module of `announced` is imported; `imported` for each import that no other import
    caused, with its begin, what the actions within it took, and its end (ns).
    """

    def __init__(
        self,
        watched: Mapping[str, Sequence[Callable[[ModuleType], None]]],
        announced: frozenset[str],
        began: Callable[[], None],
        imported: Callable[[int, int, int], None],
    ) -> None:
        self._watched = watched
        self._announced = announced
        self._began = began
        self._imported = imported
        self._thread = get_ident()
        self._outermost: str | None = None  # the module that the program itself is importing
        self._looking = False
        self._acting = False
        self._own_ns = 0  # what actions took within the outermost import

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._looking or get_ident() != self._thread:
            return None
        first = self._outermost is None
        if not first and name not in self._watched and name not in self._announced:
            return None
        start_ns = time.monotonic_ns()
        if first:
            self._own_ns = 0
        self._looking = True  # imports until then are not the program's
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
        """Run the actions for a module that was imported before. What they import is not the program's."""
        outermost = self._outermost
        self._outermost = outermost or module.__name__
        try:
            for action in self._watched.get(module.__name__, ()):
                self._guarded(action, module)
        finally:
            self._outermost = outermost

    def _watch(self, loader: Any, name: str, start_ns: int, first: bool) -> None:
        """Wrap the loader of one module, so that its end is noticed."""
        if isinstance(loader, type):  # built-in and frozen modules share a loader, and take no time
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # restores the method of the class
            if first:
                self._outermost = name
            try:
                execute(module)
            finally:
                if first:
                    self._outermost = None
                    end_ns = time.monotonic_ns()
                    self._guarded(self._imported, start_ns, self._own_ns, end_ns)
            self.imported_already(module)

        loader.exec_module = exec_module

    def _guarded(self, action: Callable[..., None], *given: Any) -> None:
        outermost, self._acting, since_ns = not self._acting, True, time.monotonic_ns()
        try:
            action(*given)
        except Exception as exc:
            import logging

            text = "restart_trace: %s: %s; the module is not traced"
            logging.getLogger(__name__).error(text, type(exc).__name__, exc)
        finally:
            if outermost:
                self._acting = False
                self._own_ns += time.monotonic_ns() - since_ns


def _find_among_others(
    watcher: ImportWatcher, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """The spec that the other finders return."""
    for finder in sys.meta_path:
        if finder is watcher or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
