"""Runs a client in another working directory: hooked.py DIRECTORY TRACE_DIR|- SCRIPT [ARGUMENT ...]; "-": untraced.

With BREAK_A_HOOK in the environment one function of the hooks raises. With SLOW_DIRECTORIES a new directory takes so
many seconds more, as on a busy metadata server.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import time
from typing import Any

directory, trace_dir, script, *arguments = sys.argv[1:]
os.chdir(directory)
sys.argv = [script, *arguments]
if "SLOW_DIRECTORIES" in os.environ:
    make = os.mkdir

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(float(os.environ["SLOW_DIRECTORIES"]))
        make(*args, **kwargs)

    os.mkdir = slow  # os.makedirs calls it
if trace_dir != "-":
    import restart_trace.hooks
    from restart_trace.hooks.running import Running

    if "BREAK_A_HOOK" in os.environ:

        def broken(self: Running, path: Any) -> str:
            raise ZeroDivisionError("planted")

        Running.name_of = broken  # type: ignore[method-assign]
    restart_trace.hooks.install(trace_dir)
try:
    runpy.run_path(script, run_name="__main__")
finally:
    atexit._run_exitfuncs()  # as an interpreter does at its end, and a rank of the zygote does not
