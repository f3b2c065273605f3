"""The formats of logs that an import knows, a module each.

To add one, add a module here: its functions take what a line says, through `reads` of imported/draft.py, into the
`Draft` of the run. All modules of this folder are imported, in the order of their names.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..draft import HANDLERS

for _module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
    importlib.import_module(f".{_module.name}", __name__)

__all__ = ["HANDLERS"]
