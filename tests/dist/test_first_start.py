"""A job that its launcher starts again, with the command that began it, goes on from its own newest checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.harness import LLAMA_STYLE, Run, Zygote
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


def test_going_back_in_its_own_directory_happens_once(launcher: Launcher) -> None:
    """With --load-tag of its own --save: a restart does not go back again; another label does."""
    save = launcher.directory / "save"
    command = [*RUN, *buffered_saving(save, 1), "--load", save]
    launcher.train(SINGLE, *command, "--exit-interval", "4")
    back = [*command, "--load-tag", "global_step1"]
    for flags, stop, expected in (
        (back, "2", [2]),
        (back, "3", [3]),
        ([*back, "--start-over", "again"], "2", [2]),
        ([*back, "--start-over", "again"], "3", [3]),
        (command, "5", [4, 5]),
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
