"""When errors of several starts are one that repeats itself, by what --save holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.repeated_errors import RepeatedErrorError, StepErrors, checkpoint_before, recorded
from megatron.config import CheckpointConfig
from tests.unit.megatron.checkpointing.test_first_start import options, saved_by


def error_of(message: str, kind: type[Exception] = ValueError) -> Exception:
    try:
        raise kind(message)
    except kind as error:
        return error


def fails(save: Path, generation: int, step: int = 12, loaded: int = 10, message: str = "bad token 7") -> None:
    (save / ".generations").mkdir(exist_ok=True)
    StepErrors(str(save), generation, loaded, rank=0).note(error_of(message), step)


def mine(save: Path, **more: Any) -> CheckpointConfig:
    return options(save, save, **more)


def test_three_starts_with_the_same_error_are_one_too_many(tmp_path: Path) -> None:
    """Numbers in a message differ between starts; the third decides."""
    for generation, message in enumerate(("bad token 7 at 0x7f01", "bad token 8 at 0x7f02")):
        fails(tmp_path, generation, message=message)
    assert checkpoint_before(mine(tmp_path)) is None
    fails(tmp_path, 2)
    fails(tmp_path, 3, message="bad token 9 at 0x7f03")
    assert checkpoint_before(mine(tmp_path)) is None  # the third was another one
    for generation in (4, 5):
        fails(tmp_path, generation, message="bad token 9 at 0x7f03")
    with pytest.raises(RepeatedErrorError, match="^iteration 12 has ended 3 starts in a row .*bad token 9") as caught:
        checkpoint_before(mine(tmp_path))
    assert caught.value.exit_code == 65 and f"{tmp_path}/global_step10. That checkpoint" in str(caught.value)
    assert "--on-repeated-error back" in str(caught.value) and "--on-repeated-error retry" in str(caught.value)


def test_another_step_or_another_kind_is_another_error(tmp_path: Path) -> None:
    for generation, step in enumerate((12, 13, 12)):
        fails(tmp_path, generation, step)
    assert checkpoint_before(mine(tmp_path)) is None
    StepErrors(str(tmp_path), 3, 10, 0).note(error_of("bad token 7", KeyError), 12)
    fails(tmp_path, 4)
    assert checkpoint_before(mine(tmp_path)) is None


def test_a_start_that_gets_past_the_step_ends_the_row(tmp_path: Path) -> None:
    for generation in range(2):
        fails(tmp_path, generation)
    passing = StepErrors(str(tmp_path), 2, 10, rank=0)
    passing.passed(11)
    assert len(recorded(str(tmp_path))) == 2
    passing.passed(12)
    assert recorded(str(tmp_path)) == []


def test_of_several_ranks_the_first_counts_once(tmp_path: Path) -> None:
    (tmp_path / ".generations").mkdir()
    for rank in (3, 0, 1):
        StepErrors(str(tmp_path), 5, 10, rank).note(error_of(f"of rank {rank}"), 12)
    (error,) = recorded(str(tmp_path))
    assert (error.rank, error.message) == (3, "ValueError: of rank 3")


def test_going_back_is_done_once_and_to_an_older_checkpoint(tmp_path: Path) -> None:
    back = mine(tmp_path, on_repeated_error="back")
    for sequence, step in enumerate((5, 10), start=1):
        saved_by(mine(tmp_path), step, sequence)
    for generation in range(3):
        fails(tmp_path, generation, loaded=0 if generation == 0 else 10)  # the first one has saved what they load
    assert checkpoint_before(back) == "global_step5"
    fails(tmp_path, 3, loaded=5)
    with pytest.raises(RepeatedErrorError, match="As going back has not helped, the data of iteration 12 or"):
        checkpoint_before(back)
    assert checkpoint_before(mine(tmp_path, on_repeated_error="retry")) is None


def test_going_back_where_there_is_nothing_older(tmp_path: Path) -> None:
    saved_by(mine(tmp_path), 10)
    for generation in range(3):
        fails(tmp_path, generation)
    with pytest.raises(RepeatedErrorError, match="No older checkpoint is there"):
        checkpoint_before(mine(tmp_path, on_repeated_error="back"))


def test_a_start_that_does_not_go_on_from_save_is_not_asked(tmp_path: Path) -> None:
    """Nor one that a person has sent to another checkpoint."""
    for generation in range(3):
        fails(tmp_path, generation)
    for other in (
        options(tmp_path),
        options(tmp_path, tmp_path / "elsewhere"),
        mine(tmp_path, load_tag="global_step5"),
    ):
        assert checkpoint_before(other) is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"step": "x"}', "null", '{"step": 1, "loaded": [], "error": 1}'])
def test_what_no_start_has_written_is_left_out(tmp_path: Path, content: str) -> None:
    for generation in range(2):
        fails(tmp_path, generation)
    (tmp_path / ".generations" / "error_00000002").write_text(content)
    assert len(recorded(str(tmp_path))) == 2 and checkpoint_before(mine(tmp_path)) is None
