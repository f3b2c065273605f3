"""Seeds of a rank."""

from __future__ import annotations

import subprocess
import sys

SEEDS = """
import traceback
import torch
from megatron.startup.initialize import import_heavy
import_heavy()
from megatron.parallel.random import MODEL_PARALLEL_RNG, get_rng_state, seed_everything
from megatron.parallel.topology import Coordinates
original = traceback.format_stack
def format_stack(*_):
    raise AssertionError("a device that is not there was to be seeded")
traceback.format_stack = format_stack
seed_everything(7, Coordinates(tp=1, pp=0, dp=0))
traceback.format_stack = original
found = get_rng_state()
torch.manual_seed(7)
assert torch.equal(found["torch_rng_state"], torch.get_rng_state())
torch.manual_seed(7 + 2718 + 1)
assert torch.equal(found["rng_tracker_states"][MODEL_PARALLEL_RNG], torch.get_rng_state())
"""


def test_seeding_is_that_of_torch_without_the_devices_that_are_not_there() -> None:
    """Of each of them torch keeps the text of the stack, which takes a rank that was just forked some milliseconds."""
    done = subprocess.run([sys.executable, "-c", SEEDS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
