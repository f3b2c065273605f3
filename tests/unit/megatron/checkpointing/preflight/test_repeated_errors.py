"""When errors of several starts are one that repeats itself, by what --save holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from traceback import clear_frames
from typing import Any

import pytest
from torch.utils.data import DataLoader

from megatron.checkpointing.preflight.first_start import FirstStart, first_start, has_own_checkpoint
from megatron.checkpointing.preflight.repeated_errors import RepeatedErrorError, StepErrors, checkpoint_before, recorded
from megatron.config import CheckpointConfig
from tests.unit.megatron.checkpointing.preflight.test_first_start import options, saved_by
from tests.unit.trace_helpers import ROOT


def error_of(message: str, kind: type[Exception] = ValueError) -> Exception:
    try:
        raise kind(message)
    except kind as error:
        return error


def start(save: Path, generation: int, loaded: int = 10, rank: int = 0, **more: Any) -> StepErrors:
    (save / ".generations").mkdir(exist_ok=True)
    return StepErrors(mine(save), FirstStart(), generation, loaded, rank, **more)


def fails(save: Path, generation: int, step: int = 12, loaded: int = 10, message: str = "bad token 7") -> None:
    start(save, generation, loaded).note(error_of(message), step)


def before(command: CheckpointConfig) -> str | None:
    return checkpoint_before(command, has_own_checkpoint(command, {}))


def mine(save: Path, **more: Any) -> CheckpointConfig:
    return options(save, save, **more)


def test_three_starts_with_the_same_error_are_one_too_many(tmp_path: Path) -> None:
    """Numbers in a message differ between starts; the third decides."""
    for generation, message in enumerate(("bad token 7 at 0x7f01", "bad token 8 at 0x7f02")):
        fails(tmp_path, generation, message=message)
    assert before(mine(tmp_path)) is None
    fails(tmp_path, 2)
    fails(tmp_path, 3, message="bad token 9 at 0x7f03")
    assert before(mine(tmp_path)) is None  # the third was another one
    for generation in (4, 5):
        fails(tmp_path, generation, message="bad token 9 at 0x7f03")
    with pytest.raises(RepeatedErrorError, match="^iteration 12 has ended 3 starts in a row .*bad token 9") as caught:
        before(mine(tmp_path))
    assert caught.value.exit_code == 65 and f"{tmp_path}/global_step10. That checkpoint" in str(caught.value)
    assert "--on-repeated-error back" in str(caught.value) and "--on-repeated-error retry" in str(caught.value)


def test_another_step_or_another_kind_is_another_error(tmp_path: Path) -> None:
    for generation, step in enumerate((12, 13, 12)):
        fails(tmp_path, generation, step)
    assert before(mine(tmp_path)) is None
    start(tmp_path, 3).note(error_of("bad token 7", KeyError), 12)
    fails(tmp_path, 4)
    assert before(mine(tmp_path)) is None


def test_a_start_that_gets_past_the_step_ends_the_row(tmp_path: Path) -> None:
    for generation in range(2):
        fails(tmp_path, generation)
    passing = start(tmp_path, 2)
    passing.passed(11)
    assert len(recorded(mine(tmp_path))) == 2
    passing.passed(12)
    assert recorded(mine(tmp_path)) == []


def test_of_several_ranks_the_first_counts_once(tmp_path: Path) -> None:
    (tmp_path / ".generations").mkdir()
    for rank in (3, 0, 1):
        start(tmp_path, 5, rank=rank).note(error_of(f"of rank {rank}"), 12)
    (error,) = recorded(mine(tmp_path))
    assert (error.rank, error.message) == (3, "ValueError: of rank 3")


CRASHES = """
import ctypes, os, sys, time
from megatron.checkpointing.preflight.first_start import FirstStart
from megatron.checkpointing.preflight.repeated_errors import StepErrors
from megatron.config import CheckpointConfig
options = CheckpointConfig(save=sys.argv[1], save_interval=1, load=sys.argv[1])
errors = StepErrors(options, FirstStart(), int(sys.argv[2]), 10, 1)
{fault}
"""
OF_A_LIBRARY = """
libc = ctypes.CDLL(None)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
time.sleep(300)
"""


def crashes(save: Path, generation: int, fault: str) -> None:
    """A start whose rank 1 ends itself by a signal."""
    (save / ".generations").mkdir(exist_ok=True)
    command = [sys.executable, "-c", CRASHES.format(fault=fault), str(save), str(generation)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode < 0


@pytest.mark.slow
def test_a_crash_is_of_the_iteration_that_an_error_would_be_of(tmp_path: Path) -> None:
    """After iteration 11, in a save or an evaluation, it is of 12: a start that does 11 again does not get past it."""
    crashes(tmp_path, 0, "ctypes.string_at(0)")
    crashes(tmp_path, 1, "errors.passed(11); ctypes.string_at(0)")
    fails(tmp_path, 2)
    crashes(tmp_path, 2, "errors.close(); ctypes.string_at(0)")  # at the end of the process
    found = [(error.step, error.error.split(" in ")[0]) for error in recorded(mine(tmp_path))]
    assert found == [(11, "SIGSEGV"), (12, "SIGSEGV"), (12, "ValueError: bad token N")]


@pytest.mark.slow
def test_an_abort_after_the_loss_of_another_rank_is_not_the_error(tmp_path: Path) -> None:
    """NCCL's watchdog, a thread without Python, aborts a rank that has lost another one."""
    crashes(tmp_path, 0, OF_A_LIBRARY)
    assert recorded(mine(tmp_path)) == []
    for generation, fault in ((1, "os.abort()"), (2, "ctypes.string_at(0)")):
        fails(tmp_path, generation)
        crashes(tmp_path, generation, fault)
    found = [error.error.split(" in ")[0] for error in recorded(mine(tmp_path))]
    assert found == ["ValueError: bad token N", "SIGSEGV"]


def test_going_back_is_done_once_and_to_an_older_checkpoint(tmp_path: Path) -> None:
    back = mine(tmp_path, on_repeated_error="back")
    for sequence, step in enumerate((5, 10), start=1):
        saved_by(mine(tmp_path), step, sequence)
    for generation in range(3):
        fails(tmp_path, generation, loaded=0 if generation == 0 else 10)  # the first one has saved what they load
    assert before(back) == "global_step5"
    start(tmp_path, 3, loaded=5, back_to="global_step5").note(error_of("bad token 7"), 12)
    with pytest.raises(RepeatedErrorError, match="As going back has not helped, the data of iteration 12 or"):
        before(back)
    assert before(mine(tmp_path, on_repeated_error="retry")) is None


def test_going_back_where_there_is_nothing_older(tmp_path: Path) -> None:
    saved_by(mine(tmp_path), 10)
    for generation in range(3):
        fails(tmp_path, generation)
    with pytest.raises(RepeatedErrorError, match="No older checkpoint of this run is there"):
        before(mine(tmp_path, on_repeated_error="back"))


def test_after_going_back_a_run_goes_on_from_what_it_has_saved_since(tmp_path: Path) -> None:
    """A preemption before that leaves nothing to go on from: then it goes back again, to the same checkpoint."""
    back = mine(tmp_path, on_repeated_error="back")
    for sequence, step in enumerate((4, 5, 10), start=1):
        saved_by(mine(tmp_path), step, sequence)
    for generation in range(3):
        fails(tmp_path, generation)
    assert before(back) == "global_step5"
    start(tmp_path, 3, loaded=5, back_to="global_step5")
    assert before(back) == "global_step5"
    start(tmp_path, 4, loaded=5, back_to="global_step5")
    saved_by(mine(tmp_path), 8, sequence=4)
    assert before(back) is None and before(mine(tmp_path)) is None
    fails(tmp_path, 5, loaded=8)
    with pytest.raises(RepeatedErrorError, match="As going back has not helped"):
        before(back)
    start(tmp_path, 6).passed(12)
    left = [path.name for path in (tmp_path / ".generations").iterdir()]
    assert recorded(mine(tmp_path)) == [] and left == ["crash_00000006"], "its own, which tells of none so far"


def test_going_back_takes_no_checkpoint_of_another_run(tmp_path: Path) -> None:
    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    command = options(tmp_path, pretrained, finetune=True, on_repeated_error="back")
    saved_by(mine(tmp_path), 5)
    saved_by(command, 10, sequence=2)
    (tmp_path / ".generations").mkdir()
    for generation in range(3):
        StepErrors(mine(tmp_path), first_start(command), generation, 10, 0).note(error_of("bad token 7"), 12)
    for resumed in (command, mine(tmp_path, on_repeated_error="back")):
        with pytest.raises(RepeatedErrorError, match="No older checkpoint of this run"):
            before(resumed)


@pytest.mark.parametrize(
    "flags", [{}, {"load": "pretrained", "finetune": True}, {"load": "run", "load_tag": "global_step5"}]
)
def test_a_run_that_has_saved_nothing_is_refused_by_its_own_command_alone(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    save = tmp_path / "run"
    (save / ".generations").mkdir(parents=True)
    load = {"load": tmp_path / flags["load"]} if flags else {}
    command = options(save, **flags | load)
    for generation in range(3):
        StepErrors(command, first_start(command), generation, 0, 0).note(error_of("bad token 7"), 1)
    with pytest.raises(
        RepeatedErrorError, match="going on from iteration 0. Suspected is the data of iteration 1"
    ) as caught:
        before(command)
    assert str(caught.value).endswith("or the program: correct the cause and give --on-repeated-error retry")
    for other in (options(save, tmp_path / "another"), mine(save, load_tag="global_step4")):
        assert before(other) is None


def out_of_memory(free: str, process: int) -> str:
    """As torch.OutOfMemoryError says it (CUDACachingAllocator.cpp)."""
    return (
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which {free} is "
        f"free. Process {process} has 76.99 GiB memory in use. Of the allocated memory {process / 1e3} GiB is "
        f"allocated by PyTorch, and {free} is reserved by PyTorch but unallocated. If that is large "
        "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def test_sizes_and_their_units_in_a_long_message_do_not_make_another_error(tmp_path: Path) -> None:
    for generation, (free, process) in enumerate([("1.20 GiB", 71234), ("512.00 KiB", 9), ("0 bytes", 1234567)]):
        fails(tmp_path, generation, message=out_of_memory(free, process))
    with pytest.raises(RepeatedErrorError, match="CUDA out of memory"):
        before(mine(tmp_path))


class Damaged:
    """A dataset in which no sample can be read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise self._error


def test_an_error_of_a_data_worker_is_the_one_that_was_raised_there(tmp_path: Path) -> None:
    for generation, error in enumerate((IndexError("document 7"), KeyError("document 7"))):
        with pytest.raises(type(error)) as caught:
            list(DataLoader(Damaged(error), num_workers=2))  # pyright: ignore[reportArgumentType]
        clear_frames(caught.tb)  # the workers end here: where Python's garbage collector ends them, that takes 5 s each
        start(tmp_path, generation).note(caught.value, 12)
    index, key = recorded(mine(tmp_path))
    assert index.message == "IndexError: document 7" and key.message == "KeyError: 'document 7'"
    assert index.error == f"IndexError: document N in {__file__}:__getitem__" and not index.same(key)


def test_a_record_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It hides no error, and leaves nothing."""
    failing = start(tmp_path, 0)
    shutil.rmtree(tmp_path / ".generations")
    failing.note(error_of("bad token 7"), 12)
    assert "error_00000000: not written, so a repeated error goes unnoticed" in caplog.text


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"step": "x"}', "null", '{"step": 1, "loaded": [], "error": 1}'])
def test_what_no_start_has_written_is_left_out(tmp_path: Path, content: str) -> None:
    for generation in range(2):
        fails(tmp_path, generation)
    (tmp_path / ".generations" / "error_00000002").write_text(content)
    assert len(recorded(mine(tmp_path))) == 2 and before(mine(tmp_path)) is None
