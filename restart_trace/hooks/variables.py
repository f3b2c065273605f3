"""What `restart-trace run` tells a job's processes in their environment. Imports nothing: each of them reads it."""

from __future__ import annotations

RANK_PID_VARIABLE = "RESTART_TRACE_HOOKS_PID"  # pid of the rank that this process is or descends from
DIRECTORY_VARIABLE = "RESTART_TRACE_HOOKS_DIR"  # directory of the trace; unset: nothing is traced
# Functions besides DeepSpeed's that save or load a checkpoint, separated by blanks.
FUNCTION_VARIABLES = {"save": "RESTART_TRACE_HOOKS_SAVES", "load": "RESTART_TRACE_HOOKS_LOADS"}


def check_function(name: str) -> str:
    """Check the name of a function, "package.module:f" or "package.module:Class.f", and return it.

    Raises ValueError if it has another form, or names a function of the script itself, which is not imported.
    """
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        raise ValueError(f"{name!r} names no function: give mypackage.module:f or mypackage.module:Class.f")
    if module == "__main__":
        raise ValueError(f"{name!r} is defined in the script itself and cannot be hooked there: move it to a module")
    return name
