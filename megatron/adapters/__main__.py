"""Runs a program in which DeepSpeed knows engine `lazy`: python -m megatron.adapters [-m] PROGRAM [ARGUMENT ...]."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import megatron.adapters.deepspeed  # noqa: F401
from restart_trace.command_line import CommandParser

_EPILOG = """\
examples:
  torchrun --nproc-per-node 8 -m megatron.adapters train.py --deepspeed ds_config.json ...
      whose JSON says "checkpoint": {"engine": {"type": "lazy"}}
  deepspeed --module megatron.adapters train.py ...
      the same, by DeepSpeed's launcher

exit status: as the program; 2 for wrong arguments
"""


def main() -> None:
    """Do what the program does; exits with status 2 and a message if there is none."""
    words = sys.argv[1:]
    # DeepSpeed's launcher gives a program its rank as the first argument: the program is to get it.
    rank = [word for word in words[:1] if word.startswith("--local_rank=")]
    parser = CommandParser(
        prog="python -m megatron.adapters",
        usage="python -m megatron.adapters [-m] PROGRAM [ARGUMENT ...]",
        description="Run a Python program in which DeepSpeed knows the checkpoint engine lazy.",
        epilog=_EPILOG,
    )
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is the name of a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM [ARGUMENT ...]")
    parsed = parser.parse_args(words[len(rank) :])
    if not parsed.program:
        parser.error("no program is given: torchrun ... -m megatron.adapters train.py ...")
    program, *arguments = parsed.program
    sys.argv = [program, *rank, *arguments]
    if parsed.module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
