"""Hooks that trace a DeepSpeed trainer as it is: its saves, loads, start-up and steps, with no change to its code.

    restart-trace run -- torchrun --nproc-per-node 8 train.py       # a command in front of the job
    torchrun -m restart_trace.run train.py                          # or in front of the program
    import restart_trace.hooks; restart_trace.hooks.install("DIR")  # or two lines, before it imports torch

Importing this package imports the standard library alone; torch and DeepSpeed are hooked when the program imports
them. docs/guides/trace_your_job.md shows what comes out.
"""

from __future__ import annotations

from restart_trace.hooks.install import install

__all__ = ["install"]
