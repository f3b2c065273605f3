"""Compilers of a CUDA build: processes that torch's starts, which it does for devices of CUDA alone (none is there, so
it is asked to), and kernels that Triton compiles for a device that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_build.conftest import ROOT
from tests.unit.restart_trace.test_compilation import traced

PROGRAM = """
import os, sys
from pathlib import Path
import torch._inductor.config
from megatron.config.arguments import config_from_args, parse_args
from megatron.startup.compilation import configure_compiler
if sys.argv[1] == "configured":
    flags = ("--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
             "--train-iters 1 --lr 1 --data-path X --tokenizer-type NullTokenizer --vocab-size 9")
    configure_compiler(config_from_args(parse_args(flags.split(), {}), {}))
from torch._inductor.async_compile import AsyncCompile
AsyncCompile.warm_pool()  # as the compiler calls it before it compiles for CUDA
me = os.getpid()
print("CHILDREN", len(Path(f"/proc/{me}/task/{me}/children").read_text().split()))
"""


def children(tmp_path: Path, configured: str, **settings: str) -> int:
    """Processes that the compiler of a process has started."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | settings
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, configured], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_rank_compiles_by_itself(tmp_path: Path) -> None:
    """A worker would end at the SIGTERM at which its rank saves, and 8 ranks of 32 cores would have 256 of them."""
    assert children(tmp_path, "configured") == 0
    assert children(tmp_path, "as torch does", TORCHINDUCTOR_COMPILE_THREADS="2") > 0


KERNELS = """
    import sys, threading, torch, triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def double(x, n: tl.constexpr):
        at = tl.arange(0, n)
        tl.store(x + at, tl.load(x + at) * 2)

    def compile_for(n):
        source = ASTSource(fn=double, signature={"x": "*fp32", "n": "constexpr"}, constexprs={"n": n})
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, weight):
            return weight.sum()

        @staticmethod
        def backward(context, gradient):
            compile_for(32 << step)
            thread = threading.Thread(target=compile_for, args=[128 << step])  # as of a CUDA device
            thread.start()
            thread.join()
            return gradient.expand(2, 2)

    compile_for(16)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        Doubled.apply(model.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_kernel_of_triton_is_a_phase_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three in the start: before the first step, and in its backward pass on the training thread and on another."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for cycle in range(2):  # with an empty cache and a full one
        spans = [r for r in traced(tmp_path, cycle, KERNELS) if r["type"] == "span" and r["operation"] == "startup"]
        (first,) = [span for span in spans if span["phase"] == "first_step"]
        compiled = [span for span in spans if span["phase"] == "compile"]
        assert compiled[0]["start_ns"] < first["start_ns"]
        within = [span for span in compiled if span["start_ns"] > first["start_ns"]]
        assert [span["thread"] == first["thread"] for span in within] == [True, False]
        others = sum(span["duration_ns"] for span in spans if span["start_ns"] > first["start_ns"])  # imports, too
        assert first["duration_ns"] == first["end_ns"] - first["start_ns"] - others
