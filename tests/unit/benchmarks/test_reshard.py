"""Sizes, flags and figures of the redistribution benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reshard.cli import main, parse_layout
from benchmarks.reshard.launch import Measurement
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
from benchmarks.reshard.report import analyse, render
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


SIZES = {"torch": 1 << 30, "lazy": 1 << 30}


def samples(wall_s: float, page_cache: str = "cold") -> list[dict[str, Any]]:
    """Of two ranks, the second of which is the slower one."""
    fast = {"page_cache": page_cache, "phases_s": {"barrier": 1.0}}
    slow = {"page_cache": None, "phases_s": {"load/read": wall_s}}
    return [{"wall_s": wall_s / 2, "bytes_read": 3 << 28, **fast}, {"wall_s": wall_s, "bytes_read": 3 << 28, **slow}]


def measurement(direct_s: float) -> Measurement:
    found = Measurement((1, 4, 1), {"source_bytes": SIZES, "own_bytes": SIZES})
    for variant in VARIANTS:
        seconds = {"plain": 1.0, "direct": direct_s}[variant.split()[0]]
        found.samples[variant] = [samples(seconds * factor) for factor in (1.0, 1.1, 0.9)]
    return found


def test_ratios_are_of_the_slowest_rank_against_the_target() -> None:
    good = analyse(measurement(1.2))
    assert good["median_s"]["plain torch"] == 1.0 and good["median_s"]["direct lazy"] == 1.2
    assert [ratio["met"] for ratio in good["ratios"]] == [True, True]
    assert good["ratios"][0]["ratio"]["value"] == pytest.approx(1.2)
    assert good["phases_s"]["direct torch"] == {"load/read": 1.2} and good["page_cache"] == "cold"
    assert good["read_per_byte"]["direct lazy"] == 1.5
    bad = analyse(measurement(1.4))
    assert [ratio["met"] for ratio in bad["ratios"]] == [False, False]
    text = render([good, bad])
    assert "direct torch / plain torch: 1.20" in text and "target at most 1.3: met" in text
    assert "direct lazy / plain lazy: 1.40" in text and "target at most 1.3: not met" in text


def test_a_cache_that_was_not_dropped_is_not_called_cold() -> None:
    found = measurement(1.2)
    found.samples["plain lazy"][1] = samples(1.0, page_cache="warm")
    assert analyse(found)["page_cache"] == "partly warm"


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_layout("4,1,2") == (4, 1, 2)
    for argv, message in ((["--onto", "8,1,1"], "no layout of this benchmark"), (["--repeat", "0"], "--repeat 0")):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2 and message in capsys.readouterr().err
    assert main(["--bytes", "100000TB"]) == 2
    assert "needed; give another" in capsys.readouterr().err
