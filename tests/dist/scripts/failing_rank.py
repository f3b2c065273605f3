"""pretrain_gpt.py in which a function fails on one rank alone.

`$FAILS_AT` is "module:function", `$FAILS_ON` the rank, `$FAILS_WITH` the name of the exception.
"""

from __future__ import annotations

import builtins
import importlib
import os
import runpy
from pathlib import Path
from typing import Any, NoReturn

from megatron.checkpointing.engines import errors

ROOT = Path(__file__).resolve().parents[3]


def fail(*_: Any) -> NoReturn:
    name = os.environ["FAILS_WITH"]
    raise (getattr(errors, name, None) or getattr(builtins, name))(f"of rank {os.environ['FAILS_ON']} alone")


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["FAILS_ON"]:
        module, function = os.environ["FAILS_AT"].split(":")
        setattr(importlib.import_module(module), function, fail)
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
