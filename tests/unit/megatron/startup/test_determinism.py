"""--deterministic on, in processes of their own: its settings are those of a whole process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import Run, Zygote

pytestmark = pytest.mark.slow  # each starts processes

TRAIN = """
import os, sys
import torch
from megatron.startup.determinism import make_deterministic

for name in {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"} - set(sys.argv[1:]):
    os.environ.pop(name, None)
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


def run(zygote: Zygote, directory: Path, **variables: str) -> Run:
    """A process whose environment has `variables`, and no other one of the two that the settings go by."""
    script = directory / "train.py"
    script.write_text(TRAIN)
    return zygote.run(list(variables), 1, directory, script=str(script), env=variables)


def test_a_process_repeats_its_gradients_and_keeps_what_the_environment_says(zygote: Zygote, tmp_path: Path) -> None:
    done = run(zygote, tmp_path)
    assert done.ok and done.output == ":4096:8 Ring\n", done.output
    done = run(zygote, tmp_path, CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="Tree")
    assert done.ok and done.output == ":16:8 Tree\n", done.output


def test_a_workspace_that_is_not_reproducible_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    done = run(zygote, tmp_path, CUBLAS_WORKSPACE_CONFIG=":8192:2")
    assert done.exit_codes == [1]
    assert "--deterministic on: CUBLAS_WORKSPACE_CONFIG=:8192:2: cuBLAS gives the same results only with" in done.output
