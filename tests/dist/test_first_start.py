"""A job that its launcher starts again, with the command that began it, goes on from its own newest checkpoint."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.dist.harness import LLAMA_STYLE, Run, Zygote, kill_all, wait_for
from tests.dist.tiny_runs import DROPOUT, MODEL, SINGLE, TRAINING, Launcher, buffered_saving, losses_of_ranks

RUN = [*MODEL, *LLAMA_STYLE, *TRAINING, *DROPOUT, "--train-iters", "5"]


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@pytest.fixture(scope="module")
def pretrained(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1 to 3, and no trace."""
    save = tmp_path_factory.mktemp("pretrained") / "run"
    flags = [*RUN, *buffered_saving(save, 1), "--restart-trace", "off", "--exit-interval", "3"]
    Launcher(zygote, dataset, save.parent).train(SINGLE, *flags)
    return save


def passed_over(run: Run) -> list[str]:
    return re.findall(r"goes on from there; (.*): describes the first start and is passed over", run.output)


def uninterrupted_and_interrupted(launcher: Launcher, *first_start: str | Path) -> tuple[list[Run], list[Path]]:
    """Two runs that begin with `first_start`: one in one piece, one of two starts with the same command."""
    whole, parts = launcher.directory / "whole", launcher.directory / "parts"
    flags = [*RUN, *first_start]
    runs = [launcher.train(SINGLE, *flags, *buffered_saving(whole, 1))]
    command = [*flags, *buffered_saving(parts, 1)]
    runs.append(launcher.train(SINGLE, *command, "--exit-interval", "2"))
    runs.append(launcher.train(SINGLE, *command))
    return runs, [whole, parts]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--finetune"],
        ["--load-tag", "global_step1", "--no-load-optim", "--no-load-rng"],
        ["--reset-iteration", "--no-load-lr-state", "--override-opt_param-scheduler"],
    ],
    ids=["load", "finetune", "no-load", "reset"],
)
def test_flags_of_the_first_start_describe_no_later_one(launcher: Launcher, pretrained: Path, flags: list[str]) -> None:
    """Bit for bit: as if nobody had stopped it, and nothing is trained twice."""
    runs, (whole, parts) = uninterrupted_and_interrupted(launcher, "--load", pretrained, *flags)
    (expected,) = losses_of_ranks(whole, SINGLE)
    (first,), (second,) = (losses_of_ranks(parts, SINGLE, cycle) for cycle in (0, 1))
    assert first | second == expected and not set(first) & set(second)
    told = " ".join([f"--load {pretrained}", *(word for word in flags if not word.startswith("--override"))])
    assert [passed_over(run) for run in runs] == [[], [], [told]]


def test_going_back_in_its_own_directory_happens_once(launcher: Launcher, pretrained: Path) -> None:
    """With --load-tag of its own --save: a restart does not go back again; another label does.

    The command that began the job, as its launcher repeats it, goes on from there, too.
    """
    save = launcher.directory / "save"
    saving = [*RUN, *buffered_saving(save, 1)]
    first = [*saving, "--load", pretrained, "--finetune"]
    launcher.train(SINGLE, *first, "--exit-interval", "4")
    back = [*saving, "--load", save, "--load-tag", "global_step1"]
    for flags, stop, expected in (
        (back, "2", [2]),
        (back, "3", [3]),
        ([*back, "--start-over", "again"], "2", [2]),
        ([*back, "--start-over", "again"], "3", [3]),
        (first, "5", [4, 5]),
    ):
        run = launcher.train(SINGLE, *flags, "--exit-interval", stop)
        assert [int(step) for step in re.findall(r"iteration +(\d+)/", run.output)] == expected


def test_requeued_job_without_load_goes_on(launcher: Launcher) -> None:
    """Whose checkpoints they are, only the launcher can say then: without its word the start is refused."""
    command = [*RUN, *buffered_saving(launcher.directory / "save", 1), "--exit-interval"]
    launcher.train(SINGLE, *command, "2")
    refused = launcher.run(SINGLE, *command, "3")
    assert refused.exit_codes == [2] and "begins from iteration 0" in refused.output
    run = launcher.train(SINGLE, *command, "3", env={"SLURM_RESTART_COUNT": "1"})
    assert "resumed from iteration 2" in run.output and passed_over(run) == ["a start from iteration 0"]


def gone(save: Path, *names: str) -> None:
    for path in (save / name for name in names):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_all_checkpoints_are_gone(launcher: Launcher, pretrained: Path) -> None:
    """The trace of the cycle before tells of them, so nothing begins anew elsewhere unless it is told to.

    With --load of its own --save: tests/dist/test_resuming_table.py.
    """
    save = launcher.directory / "save"
    command = [*RUN, *buffered_saving(save, 1), "--load", pretrained, "--finetune", "--exit-interval", "2"]
    launcher.train(SINGLE, *command)
    gone(save, "global_step1", "global_step2", "latest", "latest_checkpointed_iteration.txt")
    refused = launcher.run(SINGLE, *command)
    assert refused.exit_codes == [2]
    told = (
        f"error: --save {save}: holds no checkpoint, and this run has saved global_step2 there, as {save}/restart_trace"
    )
    assert told in refused.output and "--allow-start-over" in refused.output
    launcher.train(SINGLE, *command, "--allow-start-over")
    assert sorted(losses_of_ranks(save, SINGLE, 1)[0]) == [1, 2]


def test_a_start_before_the_first_save_has_lost_nothing(launcher: Launcher) -> None:
    save = launcher.directory / "save"
    command = [*RUN, "--load", save, *buffered_saving(save, 4)]
    killed = launcher.run(SINGLE, *command, during=lambda pids: kill_at(save, pids))
    assert killed.exit_codes == [-9]
    launcher.train(SINGLE, *command, "--exit-interval", "2")


def kill_at(save: Path, pids: list[int]) -> None:
    wait_for(lambda: any((save / "restart_trace").glob("rank_*")), "the trace")
    kill_all(pids)


def test_pointers_that_were_set_back_are_named(launcher: Launcher) -> None:
    save = launcher.directory / "save"
    command = [*RUN, "--load", save, *buffered_saving(save, 1), "--exit-interval"]
    launcher.train(SINGLE, *command, "3")
    (save / "latest").write_text("global_step1\n")
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    run = launcher.train(SINGLE, *command, "4")
    for pointer, step in (("latest", 1), ("latest_checkpointed_iteration.txt", 2)):
        told = f"{save / pointer} names global_step{step}, and global_step3 is loaded, which was committed later; "
        assert run.output.count(f"{told}--load-tag global_step{step} goes back to it") == 1
    assert "goes back to it" not in launcher.train(SINGLE, *command, "5").output


def test_a_run_that_begins_among_checkpoints_of_another(launcher: Launcher, pretrained: Path) -> None:
    """Without --load: its restarts go on, also after launches that gave --load in place of its first command."""
    save = launcher.directory / "save"
    shutil.copytree(pretrained, save)
    command = [*RUN, *buffered_saving(save, 1), "--exit-interval"]
    first = ["--allow-other-checkpoints"]
    for flags, stop in ((first, "2"), (["--load", save], "3"), (first, "4")):
        launcher.train(SINGLE, *command, stop, *flags)
    trained = [sorted(losses_of_ranks(save, SINGLE, cycle)[0]) for cycle in range(3)]
    assert trained == [[1, 2], [3], [4]]
