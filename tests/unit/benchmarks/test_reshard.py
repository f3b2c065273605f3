"""Sizes, flags and figures of the redistribution benchmark."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.reshard.__main__ import analyse, main, parse_layout, table
from benchmarks.reshard.plan import (
    BYTES_PER_PARAMETER,
    LAYERS,
    SOURCE,
    TARGETS,
    VARIANTS,
    hidden_size,
    model_flags,
    vocab_size,
)
from megatron.config.arguments import config_from_args, parse_args


@pytest.mark.parametrize("num_bytes", [24 << 20, 1_181_116_006, 4 << 30])
def test_the_checkpoint_has_about_the_size_asked_for(num_bytes: int) -> None:
    hidden = hidden_size(num_bytes)
    parameters = LAYERS * 12.25 * hidden**2 + 2 * vocab_size(hidden) * hidden
    assert parameters * BYTES_PER_PARAMETER == pytest.approx(num_bytes, rel=0.25)


@pytest.mark.parametrize("layout", [SOURCE, *TARGETS])
def test_every_layout_can_have_the_model(layout: tuple[int, int, int]) -> None:
    tp, pp, dp = layout
    env = {"RANK": "0", "WORLD_SIZE": str(tp * pp * dp), "LOCAL_RANK": "0"}
    config = config_from_args(parse_args(model_flags(896, tp, pp), env), env)
    assert config.parallel.data_parallel_size == dp and config.model.params_dtype == "bf16"
    assert vocab_size(896) % (config.model.make_vocab_size_divisible_by * tp) == 0


def samples(direct_s: float, page_cache: str = "cold") -> list[dict[str, Any]]:
    """Three rounds of two ranks, the second of which is the slower one."""
    found = []
    for factor in (1.0, 1.1, 0.9):
        for variant in VARIANTS:
            seconds = factor * {"plain": 1.0, "direct": direct_s}[variant.split()[0]]
            found.append({"variant": variant, "page_cache": page_cache, "seconds": [seconds / 2, seconds]})
    return found


def test_times_are_those_of_the_slowest_rank() -> None:
    found = analyse((1, 4, 1), samples(1.2))
    assert found.seconds["plain torch"] == [1.0, 1.1, 0.9]
    assert found.seconds["direct lazy"] == pytest.approx([1.2, 1.32, 1.08])
    text = "\n".join(table(found))
    assert text.startswith("TP2 PP2 DP2 -> TP1 PP4 DP1, page cache cold, 3 rounds")
    assert re.search(r"direct lazy +median +1\.200 s", text)


def test_a_cache_that_was_not_dropped_is_not_called_cold() -> None:
    assert analyse((1, 4, 1), [*samples(1.2), *samples(1.2, "warm")]).page_cache == "partly warm"
    assert analyse((1, 4, 1), samples(1.2, "warm")).page_cache == "warm"


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_layout("4,1,2") == (4, 1, 2)
    for argv, message in ((["--onto", "8,1,1"], "no layout of this benchmark"), (["--repeat", "0"], "--repeat 0")):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2 and message in capsys.readouterr().err
    assert main(["--bytes", "100000TB"]) == 2
    assert "needed; give another" in capsys.readouterr().err
