"""The names in a checkpoint directory are those that DeepSpeed and upstream give."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpointing.store import naming as names
from megatron.parallel.topology import Coordinates, Layout

UPSTREAM = Path(__file__).resolve().parents[4] / "golden" / "upstream_run" / "global_step5"
UPSTREAM_LAYOUT = Layout(tp=2, pp=2, dp=2)


def test_names_are_those_of_an_upstream_run() -> None:
    """Four layers on TP2 PP2 DP2 in bf16: pipeline layers 1 to 7, numbered as upstream numbers them."""
    layout = UPSTREAM_LAYOUT
    expected = {names.layer_file(number, tp) for number in range(1, 8) for tp in range(layout.tp)}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        expected |= {names.model_states_file(layout, at), names.optimizer_file(layout, at, "bf16")}
    assert {path.name for path in UPSTREAM.glob("*.pt")} == expected
    assert names.tag_of(5) == UPSTREAM.name


def test_stages_count_before_tp_ranks() -> None:
    layout = Layout(tp=4, pp=3, dp=2)
    at = Coordinates(tp=1, pp=2, dp=1)
    assert names.model_parallel_rank(layout, at) == 9
    assert names.model_states_file(layout, at) == "mp_rank_09_model_states.pt"
    assert names.optimizer_file(layout, at, "bf16") == "bf16_zero_pp_rank_1_mp_rank_09_optim_states.pt"
    for dtype in ("fp16", "fp32"):
        assert names.optimizer_file(layout, at, dtype) == "zero_pp_rank_1_mp_rank_09_optim_states.pt"
    divided = Layout(tp=1, pp=1, dp=2, zero=3)
    assert names.model_states_file(divided, divided.coordinates(1)) == "zero_pp_rank_1_mp_rank_00_model_states.pt"
    assert names.layer_file(101, 12) == "layer_101-model_12-model_states.pt"


def test_layers_and_experts_are_known_by_the_names_of_their_files() -> None:
    for number, tp in ((1, 0), (101, 12)):
        assert names.layer_of(names.layer_file(number, tp)) == (number,)
        assert names.layer_of(names.expert_file(number, 10, tp)) == (number, 10)
    at = UPSTREAM_LAYOUT.coordinates(0)
    for other in (names.model_states_file(UPSTREAM_LAYOUT, at), names.optimizer_file(UPSTREAM_LAYOUT, at, "bf16")):
        assert names.layer_of(other) is None


@pytest.mark.parametrize("step", [0, 5, 10, 123456])
def test_step_and_tag(step: int) -> None:
    assert names.step_of(names.tag_of(step)) == step


@pytest.mark.parametrize(
    "tag", ["", "global_step", "global_step-1", "global_step5.replaced", "xglobal_step5", "iter_5", "global_step5\n"]
)
def test_other_tags_have_no_step(tag: str) -> None:
    assert names.step_of(tag) is None


def test_unfinished_saves_are_hidden_and_told_apart() -> None:
    one, other = (names.temporary_directory("global_step5", attempt) for attempt in ("000_1", "000_2"))
    assert one != other and one.startswith(".") and names.step_of(one) is None
