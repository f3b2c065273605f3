"""Agents of several nodes on this host, forked from one process that has imported what each would import by itself.

Run as a program, with the number of agents and their command line, in which NODE is the number of each: prints the list
of their process ids, and ends when all of them have ended. What they print goes to its standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from megatron.launch.cli import main as launch
from megatron.training.heavy_imports import import_for_forks


def _agent(words: list[str]) -> int:
    sys.argv = ["megatron.launch", *words]
    try:
        return launch()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def main() -> None:
    import_for_forks()
    pids = []
    for node in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            code = _agent([str(node) if word == "NODE" else word for word in sys.argv[2:]])
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    for _ in pids:
        os.wait()


if __name__ == "__main__":
    main()
