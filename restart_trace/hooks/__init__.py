"""Hooks that trace the saves, loads, start-up and steps of a trainer, without changes to its code.

    restart-trace run -- torchrun --nproc-per-node 8 train.py       # before the command of the job
    torchrun -m restart_trace.run train.py                          # or before the program
    import restart_trace.hooks; restart_trace.hooks.install("DIR")  # or two lines, before it imports torch

A program whose steps no hook sees says after each of them: restart_trace.hooks.step(NUMBER).

Importing this package imports the standard library only; torch, DeepSpeed and the others are hooked when the program
imports them. docs/guides/trace_your_job.md shows the results.
"""

from __future__ import annotations

from restart_trace.hooks.install import install, step

__all__ = ["install", "step"]
