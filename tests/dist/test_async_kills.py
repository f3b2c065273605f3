"""Asynchronous saves under SIGKILL: what was committed last is loaded, and nobody waits for a rank that is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.async_runs import TINY_RUN, committed, run, save_ends, train
from tests.dist.harness import Zygote, kill_all, losses, wait_for
from tests.dist.test_commit_protocol import CRASH, TWO, loaded_tags
from tests.dist.test_commit_protocol import LAYOUT as FOUR
from tests.dist.tiny_runs import Launcher, saving
from tools.restart_drill.injection_points import TraceTail

FLAGS = [*TINY_RUN, "--train-iters", "6"]


@pytest.fixture(scope="module")
def expected(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that was never interrupted."""
    launcher = Launcher(zygote, dataset, tmp_path_factory.mktemp("expected"))
    trace = launcher.directory / "trace"
    launcher.train(TWO, *FLAGS, "--restart-trace-dir", trace)
    return losses(trace)


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def kill_when(
    save: Path, reached: Callable[[dict[str, Any]], bool], victims: slice, rank: int = 0
) -> Callable[[list[int]], None]:
    """Kill `victims` as soon as a record of `rank` in the first launch is what `reached` looks for."""

    def during(pids: list[int]) -> None:
        tail = TraceTail(save / "restart_trace", 0, rank)
        wait_for(lambda: any(reached(r) for r in tail.new_records()), "the moment to kill")
        kill_all(pids[victims])

    return during


def iteration(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda r: r["type"] == "iteration" and r["step"] == step


def hashes_written(r: dict[str, Any]) -> bool:
    """The last that a rank writes of its save of iteration 2."""
    return r.get("detail") == "fsync" and r.get("file", "").startswith("tensor_hashes") and r["step"] == 2


def check_resumes_from(launcher: Launcher, save: Path, step: int, expected: dict[int, float]) -> None:
    """The next launch loads `step`, and its losses are those of a run that was never interrupted."""
    train(launcher, TWO, *FLAGS, *saving(save, 1), "--load", save)
    assert loaded_tags(save / "restart_trace", 1, TWO.world_size) == [f"global_step{step}"] * 2
    assert losses(save / "restart_trace", 1) == {s: x for s, x in expected.items() if s > step}
    assert not list(save.glob(".incomplete*"))


@pytest.mark.parametrize(
    ("delay", "moment"),
    [('{"2": 600}', iteration(3)), ('{"2": [0, 600]}', hashes_written)],
    ids=["writing in the background", "between write and commit"],
)
def test_sigkill_before_the_commit(
    launcher: Launcher, expected: dict[int, float], delay: str, moment: Callable[[dict[str, Any]], bool]
) -> None:
    """Saves of 1 and 2 are begun; that of 1 is committed, since that of 2 has waited for it."""
    save = launcher.directory / "run"
    flags = [*FLAGS, *saving(save, 1)]
    killed = run(launcher, TWO, *flags, env={"SLOW_DELAY": delay}, during=kill_when(save, moment, slice(None)))
    assert killed.exit_codes == [-9, -9]
    assert committed(save) == ["global_step1"] and len(list(save.glob(".incomplete_global_step2*"))) == 1
    check_resumes_from(launcher, save, 1, expected)


def test_sigkill_during_the_commit(launcher: Launcher, expected: dict[int, float]) -> None:
    """One job: the manifest of 2 is written and 1 loaded, then the rename of 2 and `latest` of 3 are the last."""
    save = launcher.directory / "run"
    trace = save / "restart_trace"
    flags = [*FLAGS, *saving(save, 1), "--load", save]
    for cycle, (point, step) in enumerate([("manifest", 2), ("renamed", 2), ("latest", 3)]):
        env = {"SLOW_DELAY": "0.05", "THEN": CRASH, "CRASH_AFTER": point, "CRASH_STEP": str(step)}
        killed = run(launcher, TWO, *flags, env=env, launcher=True)
        assert killed.exit_codes[0] == -9 and killed.exit_codes[1] != 0
        assert losses(trace, cycle).items() <= expected.items()
    train(launcher, TWO, *flags)
    for cycle, tag in enumerate([None, "global_step1", "global_step2", "global_step3"]):
        assert loaded_tags(trace, cycle, TWO.world_size) == [tag] * 2
    assert losses(trace, 3) == {s: x for s, x in expected.items() if s > 3}
    assert not list(save.glob(".incomplete*"))


def test_rank_that_dies_while_the_others_agree(launcher: Launcher) -> None:
    """They are told by the broken connections, say so, commit nothing and end by themselves."""
    save = launcher.directory / "run"
    flags = [*TINY_RUN, "--num-layers", "4", "--train-iters", "500", *saving(save, 2)]
    kill_last = kill_when(save, hashes_written, slice(-1, None))
    finished = run(launcher, FOUR, *flags, env={"SLOW_DELAY": "[0, 0, 0, 600]"}, during=kill_last)
    assert finished.exit_codes[-1] == -9
    assert all(code > 0 for code in finished.exit_codes[:-1]), finished.exit_codes
    assert committed(save) == [] and len(list(save.glob(".incomplete_global_step2*"))) == 1
    for rank in range(FOUR.world_size - 1):
        end = save_ends(save, rank)[0]  # training may have got as far as the next one
        assert end["outcome"] == "failed"
        assert "checkpoint global_step2: the ranks lost their connections while they agreed on it" in end["error"]
    assert "the ranks lost their connections" in finished.log(0)
    # Whichever comes first: a collective of training that breaks, or the news that no save can be agreed on any more.
    assert "lost the connection" in finished.log(0) or "can no longer agree on checkpoints" in finished.log(0)
