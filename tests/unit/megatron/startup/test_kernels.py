"""--warmup-kernels and the optimizer; what it leaves as it is: tests/dist/test_warmup.py."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import OptimizerConfig
from megatron.optimizer.build import build_optimizer
from megatron.startup.kernels import warm_up_optimizer
from tools.ckpt_plan.step_time.passes import PassRecorder

ROOT = Path(__file__).resolve().parents[4]
OF_THE_LAYER = {"ones", "ones_like", "sum", "expand", "zeros"}


@pytest.mark.slow
def test_every_operator_of_deepspeeds_step_has_run_in_the_warm_up() -> None:
    """As BF16_Optimizer performs them in another process: accumulation, reduction, norm, clipping, update."""
    script = ROOT / "tests" / "unit" / "tools" / "ckpt_plan" / "count_optimizer_passes.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = set(json.loads(done.stdout.splitlines()[-1])["immediate"]["operators"])
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = build_optimizer(layer, OptimizerConfig(lr=0.1))
    with PassRecorder() as recorder:
        warm_up_optimizer(optimizer, torch.bfloat16, torch.device("cpu"))
    assert expected - {each.name for each in recorder.passes} <= OF_THE_LAYER


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd", "sgd_momentum": 0.9}], ids=["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_optimizer_of_the_run_stays_as_it_is(options: dict[str, Any], dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(layer, OptimizerConfig(lr=0.1, **options))
    before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(layer.state_dict())
    random = torch.get_rng_state()
    warm_up_optimizer(optimizer, dtype, torch.device("cpu"))
    assert optimizer.state_dict() == before
    assert all(torch.equal(layer.state_dict()[name], weight) for name, weight in weights.items())
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert torch.equal(torch.get_rng_state(), random)
