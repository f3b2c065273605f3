"""The formats of logs that an import knows, a module each.

To add one, add a module here: its functions take what a line says, through `reads` of imported/draft.py, into the
`Draft` of the run. Its LOGS says to users what they can give, in a few words; empty: lines within the logs of another
module. Its PROGRAMS are the programs that write them, which the documentation names. All modules of this folder are
imported, in the order of their names.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..draft import HANDLERS

PROGRAMS: list[str] = []  # whose logs these are
_logs: list[str] = []
for _module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
    _format = importlib.import_module(f".{_module.name}", __name__)
    PROGRAMS += _format.PROGRAMS
    _logs += [_format.LOGS] if _format.LOGS else []
LOGS = f"{', '.join(_logs[:-1])}, or {_logs[-1]}"

__all__ = ["HANDLERS", "LOGS", "PROGRAMS"]
