"""Collectives of tensor parallelism run beside the products that do not need them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import Zygote

SCRIPT = Path(__file__).with_name("scripts") / "late_rank.py"


@pytest.mark.parametrize(
    ("product", "more"),
    [
        pytest.param("2", [], id="all-reduce-beside-gradient-of-weight"),
        pytest.param("1", ["--sequence-parallel"], id="all-gather-beside-gradient-of-input"),
    ],
)
def test_a_rank_goes_on_computing_while_the_other_is_late(
    zygote: Zygote, tmp_path: Path, product: str, more: list[str]
) -> None:
    run = zygote.run([product, *more], 2, tmp_path / "logs", script=str(SCRIPT))
    assert run.ok, run.output
