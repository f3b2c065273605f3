"""Which start of a run is this, and what of the command describes only the first one."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.preflight.directories import check_save
from megatron.checkpointing.preflight.first_start import (
    FLAGS,
    FirstStart,
    began,
    first_start,
    has_own_checkpoint,
    later_start,
    passed_over,
)
from megatron.checkpointing.store.commit import write_manifest
from megatron.config import CheckpointConfig, ConfigError
from tests.faults.injection import Fault, Traced, faults_at, in_a_small_process, run_traced
from tests.unit.megatron.checkpointing.store.test_commit import manifest_of

AGAIN = [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "1"}]
EACH = [
    {"load_tag": "global_step5"}, {"universal_checkpoint": True}, {"finetune": True}, {"reset_iteration": True},
    {"no_load_optim": True}, {"no_load_rng": True}, {"no_load_lr_state": True},
]  # fmt: skip


def options(save: Path, load: Path | None = None, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(save=str(save), save_interval=1, load=load and str(load), **more)


def saved_by(begun_with: CheckpointConfig, step: int = 5, sequence: int = 1, **changed: str) -> None:
    """A checkpoint in --save of a run that began with these flags."""
    directory = Path(str(begun_with.save)) / f"global_step{step}"
    directory.mkdir(parents=True)
    begins = began(begun_with)
    kept = {"loaded_from": begins.loaded_from, "first_start": begins.flags, "resumed_with": begins.resumed_with}
    kept |= changed
    write_manifest(directory, dataclasses.replace(manifest_of(step), sequence=sequence, **kept), fsync=False)
    (directory.parent / "latest").write_text(directory.name)


def goes_on(checkpoint: CheckpointConfig, env: dict[str, str] | None = None) -> bool:
    return has_own_checkpoint(checkpoint, env or {})


def test_every_flag_of_a_first_start_is_tried_here() -> None:
    assert [name for each in EACH for name in each] == list(FLAGS)


@pytest.mark.parametrize("flags", [{}, *EACH], ids=lambda flags: next(iter(flags), "load"))
def test_a_later_start_has_no_flag_of_the_first(tmp_path: Path, flags: dict[str, Any]) -> None:
    save, pretrained = tmp_path / "run", tmp_path / "pretrained"
    pretrained.mkdir()
    mine = options(save, pretrained, keep_last=3, **flags)
    assert not goes_on(mine)
    save.mkdir()
    assert not goes_on(mine)
    saved_by(mine)
    assert goes_on(mine)
    assert later_start(mine) == options(save, save, keep_last=3)
    check_save(later_start(mine))
    assert f"--load {pretrained}" in passed_over(mine) and "--start-over LABEL" in passed_over(mine)
    assert not goes_on(later_start(mine))  # which resumes by itself: nothing is passed over


def test_a_later_start_from_a_directory_has_no_flag_of_object_storage(tmp_path: Path) -> None:
    """Which --load of the first start needed: without it they would be refused."""
    mine = dataclasses.replace(
        options(tmp_path), load="s3://bucket/pretrained", storage_cache=str(tmp_path / "cache"), storage_deadline=5
    )
    saved_by(mine)
    assert goes_on(mine) and later_start(mine) == options(tmp_path, tmp_path)


@pytest.mark.parametrize("env", [{}, *AGAIN], ids=["no word", "in place", "requeued"])
def test_a_run_that_begins_from_iteration_0_among_checkpoints_of_others(tmp_path: Path, env: dict[str, str]) -> None:
    """By the flag that its checkpoints keep they are told from those of the others, so a restart goes on from them."""
    mine = options(tmp_path, allow_other_checkpoints=True)
    saved_by(options(tmp_path), 9)
    check_save(mine)
    assert not goes_on(mine, env)  # it has saved nothing yet
    saved_by(mine, 5, sequence=2)
    assert goes_on(mine, env) and later_start(mine).load == str(tmp_path)
    assert "; --allow-other-checkpoints: describes the first start and is passed over" in passed_over(mine)
    again = options(tmp_path, allow_other_checkpoints=True, start_over="again")
    assert not goes_on(again, env)
    saved_by(again, 3, sequence=3)
    assert goes_on(again, env) and goes_on(mine, env)


def test_a_resume_of_its_own_directory_keeps_how_the_run_began(tmp_path: Path) -> None:
    """So the command of the first start goes on, too, after launches that gave --load SAVE in its place."""
    save, pretrained = tmp_path / "run", tmp_path / "pretrained"
    first, resumed = options(save, pretrained, finetune=True), options(save, save)
    assert began(first) == first_start(first)
    save.mkdir()
    assert began(resumed) == FirstStart()
    saved_by(first)
    assert began(resumed) == first_start(first) == FirstStart(str(pretrained), f"--load {pretrained} --finetune")
    saved_by(resumed, 6, sequence=2)
    assert goes_on(first)


@pytest.mark.parametrize("flags", EACH, ids=lambda flags: next(iter(flags)))
def test_a_launcher_may_repeat_the_first_command_after_the_run_went_back(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Somebody goes back by hand; the launcher starts the job with the command that it has."""
    save, pretrained = tmp_path / "run", tmp_path / "pretrained"
    first, back = options(save, pretrained, finetune=True), options(save, save, **flags)
    saved_by(first)
    assert not goes_on(back)
    saved_by(back, 6, sequence=2)
    assert began(first) == began(back) == began(options(save, save)) != first_start(first)
    for sequence, command in enumerate((first, back, options(save, save)), start=3):
        assert goes_on(first) and goes_on(back)
        saved_by(command, 4 + sequence, sequence=sequence)
    assert not goes_on(options(save, pretrained)), "a command that no start of this run has had"
    again = dataclasses.replace(back, load_tag="global_step6")
    assert not goes_on(again)
    saved_by(again, 10, sequence=6)
    assert goes_on(again) and goes_on(first) and not goes_on(back)


def test_a_run_from_iteration_0_that_went_back_is_requeued(tmp_path: Path) -> None:
    first = options(tmp_path)
    saved_by(first)
    saved_by(options(tmp_path, tmp_path, load_tag="global_step5"), 6, sequence=2)
    assert goes_on(first, {"SLURM_RESTART_COUNT": "1"}) and not goes_on(first)


@pytest.mark.parametrize("state", ["optim", "rng"])
def test_a_run_that_does_not_save_a_state_does_not_load_it_later(tmp_path: Path, state: str) -> None:
    lacks = {f"no_load_{state}": True, f"no_save_{state}": True}
    mine = options(tmp_path, tmp_path, finetune=True, **lacks)
    saved_by(mine)
    assert goes_on(mine) and later_start(mine) == options(tmp_path, tmp_path, **lacks)
    told = f"--no-load-{state} applies again, as --no-save-{state} is given"
    assert "; --finetune: describes the first start" in passed_over(mine) and passed_over(mine).endswith(told)
    alone = options(tmp_path, tmp_path, **lacks)
    assert passed_over(alone).endswith(f"goes on from there; {told}")


@pytest.mark.parametrize("flags", EACH, ids=lambda flags: next(iter(flags)))
def test_flags_of_a_run_that_begins_in_its_own_directory(tmp_path: Path, flags: dict[str, Any]) -> None:
    """They are obeyed until the run has saved, and once only."""
    mine = options(tmp_path, tmp_path, **flags)
    saved_by(options(tmp_path, tmp_path), 10)
    assert not goes_on(mine)
    saved_by(mine, 6, sequence=2)
    assert goes_on(mine)
    saved_by(options(tmp_path, tmp_path), 7, sequence=3)  # of a launch without the flags
    assert goes_on(mine)
    saved_by(options(tmp_path, tmp_path, load_tag="global_step10"), 11, sequence=4)
    assert goes_on(mine) == (flags == {"load_tag": "global_step10"})  # news again


def test_another_begin_is_another_run(tmp_path: Path) -> None:
    save, pretrained, other = tmp_path / "run", tmp_path / "pretrained", tmp_path / "other"
    saved_by(options(save, pretrained, finetune=True))
    for another in (options(save, pretrained), options(save, other, finetune=True), options(save)):
        assert not goes_on(another)
        with pytest.raises(ConfigError) as caught:
            check_save(another)
        assert f"of a run that began with --load {pretrained} --finetune)" in str(caught.value)
        offered = "--start-over LABEL" in str(caught.value)
        with contextlib.nullcontext() if offered else pytest.raises(ConfigError):
            check_save(dataclasses.replace(another, start_over="again"))
        assert offered == (another.load == str(pretrained)), "where it is offered, and there alone, it is accepted"


def test_a_label_begins_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save, pretrained = tmp_path / "run", tmp_path / "pretrained"
    saved_by(options(save, pretrained, finetune=True), 5)
    second = options(save, pretrained, finetune=True, start_over="second")
    assert not goes_on(second)
    check_save(second, warn=False)
    assert caplog.messages == []
    check_save(second)
    (warning,) = caplog.messages
    assert "the newest is global_step5), and it begins once more, as --start-over second says" in warning
    saved_by(second, 3, sequence=2)
    assert goes_on(second) and later_start(second) == options(save, save)
    assert not goes_on(options(save, pretrained, finetune=True, start_over="third"))
    without = options(save, pretrained, finetune=True)
    assert goes_on(without) and began(without) == began(second), "its own checkpoints keep the label"
    assert not goes_on(options(save, pretrained)) and not goes_on(options(save, tmp_path, finetune=True))


def test_a_label_where_there_is_nothing_to_begin_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--start-over again: --load .* is the directory of --save"):
        options(tmp_path, tmp_path, start_over="again")
    with pytest.raises(ConfigError, match="--start-over 'two words'|--start-over two words"):
        options(tmp_path, start_over="two words")


@pytest.mark.parametrize("env", AGAIN, ids=["in place", "requeued"])
def test_without_load_the_launcher_must_say_so_too(tmp_path: Path, env: dict[str, str]) -> None:
    mine, zero = options(tmp_path), dict.fromkeys(env, "0")
    assert not goes_on(mine, env)
    saved_by(mine)
    assert goes_on(mine, env) and not goes_on(mine) and not goes_on(mine, zero)
    with pytest.raises(ConfigError, match="and this run begins from iteration 0"):
        check_save(mine)
    assert not goes_on(options(tmp_path, allow_other_checkpoints=True), env)  # which does not say that they are its own
    saved_by(options(tmp_path, tmp_path / "elsewhere"), 6, sequence=2)
    assert not goes_on(mine, env)


def test_manifest_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    mine = options(tmp_path / "run", tmp_path / "pretrained")
    saved_by(mine, 5)
    saved_by(mine, 6, sequence=2)
    (tmp_path / "run" / "global_step6" / "manifest.json").write_text("{}")
    assert goes_on(mine)


def test_links_to_one_place_are_one_place(tmp_path: Path) -> None:
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "link").symlink_to("pretrained")
    saved_by(options(tmp_path / "run", tmp_path / "pretrained"))
    assert goes_on(options(tmp_path / "run", tmp_path / "link"))


@pytest.mark.slow
def test_storage_that_does_not_answer_makes_no_first_start(tmp_path: Path) -> None:
    """The run would begin again over its own checkpoints, or save others under another beginning."""
    in_a_small_process(start_with_each_fault, tmp_path / "run", tmp_path / "pretrained")


def start_with_each_fault(save: Path, pretrained: Path) -> None:
    pretrained.mkdir()
    mine = options(save, pretrained, finetune=True)
    resumed = options(save, save)
    saved_by(mine)
    assert goes_on(mine) and began(resumed) == first_start(mine)

    def work() -> tuple[bool, FirstStart] | str:
        try:
            return goes_on(mine), began(resumed)
        except OSError as error:
            return str(error)

    def run(fault: Fault | None) -> Traced:
        return run_traced(work, lambda path: f"{path}/".startswith(f"{save}/"), fault)

    for faults in faults_at(run(None).calls):
        for fault in (fault for fault in faults if fault.effect == "EIO"):
            found = run(fault)
            told = isinstance(found.result, str) and "Input/output error" in found.result
            assert told or found.result == (True, first_start(mine)), f"{fault} ({found.hit}): {found.raised}"
