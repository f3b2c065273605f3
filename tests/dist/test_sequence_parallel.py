"""Sequence parallelism by itself: memory and dropout. Losses and files: test_parallel_equivalence.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.harness import Zygote
from tests.unit.tools.ckpt_plan.test_activations import BATCH, LLAMA, SEQ, config_of, more_on_a_cpu
from tools.ckpt_plan.activations import layer_bytes

SCRIPT = Path(__file__).with_name("scripts") / "sequence_parallel_layer.py"


@pytest.mark.parametrize("flags", [f"--bf16 {LLAMA} --hidden-dropout 0", "--bf16 --hidden-dropout 0.1"])
def test_a_layer_keeps_what_the_plan_says_and_ranks_draw_masks_of_their_own(
    zygote: Zygote, tmp_path: Path, flags: str
) -> None:
    run = zygote.run(flags.split(), 2, tmp_path / "logs", script=str(SCRIPT), env={"OUT": str(tmp_path)})
    assert run.ok, run.output
    one, other = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    config = config_of(flags, tp=2)
    expected = BATCH * SEQ * (layer_bytes(config.model, 2, sequence_parallel=True) + more_on_a_cpu(config) // 2)
    assert one["kept"] == other["kept"] == expected
    assert one["masks"]["False"] == other["masks"]["False"]
    assert one["masks"]["True"] != other["masks"]["True"]
    config = config_of(flags)
    of_token = layer_bytes(config.model, 1, exchanges=True) + more_on_a_cpu(config)
    assert one["exchanging"] == other["exchanging"] == BATCH * SEQ // 2 * of_token
