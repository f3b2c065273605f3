"""--deterministic on, in processes of their own: its settings are those of a whole process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.trace_helpers import ROOT

pytestmark = pytest.mark.slow  # each starts interpreters that import torch

TRAIN = """
import os, sys
import torch
from megatron.startup.determinism import make_deterministic

make_deterministic()
assert "torch._inductor" not in sys.modules, "every start would wait for these imports"
assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
assert not torch.backends.cuda.mem_efficient_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark

from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.topology import TensorParallelGroup

def step():
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(64, 32)
    ids = torch.randint(0, 64, (2, 16))
    hidden = embedding(ids).view(2, 16, 4, 8).transpose(1, 2)
    hidden = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
    logits = hidden.transpose(1, 2).reshape(2, 16, 32) @ embedding.weight.T
    vocab_parallel_cross_entropy(logits, ids, TensorParallelGroup(rank=0, size=1)).sum().backward()
    return embedding.weight.grad

assert torch.equal(step(), step())
print(os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"])
"""


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")}
    return subprocess.run(
        [sys.executable, "-c", TRAIN], env=kept | variables, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_a_process_repeats_its_gradients_and_keeps_what_the_environment_says() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (0, ":4096:8 Ring\n"), done.stderr
    done = run(CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="Tree")
    assert (done.returncode, done.stdout) == (0, ":16:8 Tree\n"), done.stderr


def test_a_workspace_that_is_not_reproducible_is_refused() -> None:
    done = run(CUBLAS_WORKSPACE_CONFIG=":8192:2")
    assert done.returncode == 1
    assert "--deterministic on: CUBLAS_WORKSPACE_CONFIG=:8192:2: cuBLAS gives the same results only with" in done.stderr
