"""Processes that torch's compiler starts, which it does for devices of CUDA alone: none is there, so it is asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cuda_build.conftest import ROOT

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
