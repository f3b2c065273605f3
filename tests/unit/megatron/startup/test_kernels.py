"""--warmup-kernels and the optimizer; what it leaves as it is: tests/dist/test_warmup.py."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import OptimizerConfig
from megatron.optimizer.build import build_optimizer
from megatron.startup.kernels import warm_up_optimizer
from tests.dist.harness import Zygote
from tools.ckpt_plan.step_time.passes import PassRecorder

ROOT = Path(__file__).resolve().parents[4]
OF_THE_LAYER = {"ones", "ones_like", "sum", "expand", "zeros"}


@pytest.mark.slow
def test_every_operator_of_deepspeeds_step_has_run_in_the_warm_up(zygote: Zygote, tmp_path: Path) -> None:
    """As BF16_Optimizer performs them in another process: accumulation, reduction, norm, clipping, update."""
    script = ROOT / "tests" / "unit" / "tools" / "ckpt_plan" / "count_optimizer_passes.py"
    run = zygote.run([], 1, tmp_path, script=str(script))
    assert run.ok, run.output
    expected = set(json.loads(run.log().splitlines()[-1])["immediate"]["operators"])
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
