"""The engines of this project that tests save and load with."""

from __future__ import annotations

from megatron.checkpointing.engines.registry import builtin_engines

# Engines that cannot save and load on a machine with no CUDA device, and why; conformance/test_exceptions.py holds them
# to that.
EXCEPTIONS = {"none": "writes nothing", "datastates": "saves from CUDA devices only"}
# The others: each passes the whole suite of conformance, and has each of its system calls fail in tests.faults.
EXPECTED = tuple(name for name in builtin_engines() if name not in EXCEPTIONS)
