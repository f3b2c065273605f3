"""Calls a function: MODULE NAME PATH..., for `Zygote.call`."""

import importlib
import sys
from pathlib import Path

module, name, *paths = sys.argv[1:]
getattr(importlib.import_module(module), name)(*map(Path, paths))
