"""A traced process with a CUDA build, before it uses CUDA: the trace must not be what initialises the driver."""

from __future__ import annotations

import subprocess
import sys

from tests.cuda_build.conftest import CudaHost


def test_a_sample_of_a_process_that_does_not_use_cuda_leaves_it_so(cuda_host: CudaHost) -> None:
    """It may fork processes that do, as a launcher or an own loader of batches."""
    code = "import torch; from restart_trace.probes import make_probe; assert make_probe(0)()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=cuda_host.environment, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr, cuda_host.calls()) == (0, "", {})
