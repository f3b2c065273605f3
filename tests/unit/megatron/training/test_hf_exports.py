"""Exports beside a training: one at a time, the newest waits, and what is not exported is said with a command."""

from __future__ import annotations

import logging
import os
import resource
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.checkpointing.store.ownership import claim
from megatron.config import CheckpointConfig, ConfigError, ModelConfig
from megatron.config.arguments import config_from_args, parse_args
from megatron.hf.source import owner_of
from megatron.parallel.topology import Layout
from megatron.startup.preflight import check_exports
from megatron.training.hf_exports import NOTICE, HFExports
from restart_trace.recorder import Recorder
from tests.dist import forked_writers
from tests.dist.harness import HANGS_S, Zygote, wait_for
from tests.dist.test_hf_exports import Held
from tests.unit.megatron.checkpointing.store.test_removal import ListSink
from tests.unit.megatron.hf.models import LLAMA, drawn, save
from tools import hf_convert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_environment")]
STEPS = (5, 10, 15)
RUN, ANOTHER = "1" * 32, "2" * 32
GENERATION = 3
START = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--data-path x --tokenizer-type NullTokenizer --vocab-size 99 --no-query-key-layer-scaling --train-iters 20 "
    "--save-interval 5 --export-hf-interval 5"
)


def save_at(directory: Path, step: int, run_id: str = RUN) -> None:
    """Save a model with new weights."""
    model = ModelConfig(**LLAMA)
    save(directory, model, drawn(model), Layout(1, 1, 1), "torch", step=step, run_id=run_id)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training saved."""
    directory = tmp_path_factory.mktemp("saved") / "save"
    for step in STEPS:
        save_at(directory, step)
    return directory


@pytest.fixture
def forked(zygote: Zygote) -> Iterator[None]:
    """For a test that asks for it: its exports are forked, and import nothing. Those of others begin as users' do."""
    with forked_writers.installed(zygote.forks):
        yield


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


class Exports(HFExports):
    """With the directory, the set and the records that a test looks at."""

    def __init__(self, saved: Path, directory: Path, wait_s: float = HANGS_S, **more: Any) -> None:
        self.directory, self.in_use = directory, set[Path]()
        self._others = children()
        self.sink = ListSink()
        options = CheckpointConfig(
            save=str(saved),
            save_interval=5,
            export_hf_interval=5,
            export_hf_dir=str(directory),
            export_hf_wait=wait_s,
            keep_last=more.get("keep_last"),
        )
        super().__init__(options, more.get("run_id", RUN), GENERATION, self.in_use, Recorder(self.sink, {}))

    @property
    def processes(self) -> list[psutil.Process]:
        """Those that export."""
        return [*children() - self._others]

    @property
    def notices(self) -> dict[int, str]:
        return {r["step"]: r["detail"] for r in self.sink.records if r.get("phase") == NOTICE}


@pytest.fixture
def exports(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Iterator[Exports]:
    made = Exports(saved, tmp_path / "models", getattr(request, "param", HANGS_S))
    yield made
    made.finish(lambda: True)
    assert not made.processes


@pytest.fixture
def small_files() -> Iterator[None]:
    """Storage refuses what an export writes (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_export_is_that_of_the_command(exports: Exports, saved: Path, tmp_path: Path) -> None:
    """What a killed one of this run has left is removed, and nothing of others."""
    owner = owner_of(RUN, saved, exports.directory)
    others = {".incomplete_iteration_3_abcd1234", f".incomplete_iteration_3_{ANOTHER}_00000001_abcd1234"}
    others.add(f".incomplete_iteration_3_{owner}_00000004_abcd1234")  # this launch was superseded
    for name in (*others, f".incomplete_iteration_3_{owner}_00000002_abcd1234"):
        left = exports.directory / name
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
    exports.saving(5)
    assert exports.in_use == {saved / "global_step5"}
    exports.committed(5)
    exports.finish(lambda: False)
    words = ["--load", str(saved), "--load-tag", "global_step5", "--out", str(tmp_path / "by_hand")]
    assert hf_convert.main(["export", *words]) == 0
    assert content(exports.directory / "iteration_5") == content(tmp_path / "by_hand")
    assert {path.name for path in exports.directory.iterdir()} == {"iteration_5", *others} and not exports.in_use
    assert exports.notices[5].startswith("exported in ")
    exports.resumed(5)
    assert not exports.processes


@pytest.mark.usefixtures("forked")
def test_what_is_there_already_is_replaced_if_it_is_of_this_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And else left alone: the command that is told writes to another directory."""
    mine, out = tmp_path / "save", tmp_path / "models" / "iteration_5"
    exports = Exports(mine, out.parent)
    contents = list[dict[str, bytes]]()
    for _ in range(2):
        save_at(mine, 5)
        exports.committed(5)
        exports.finish(lambda: False)
        contents.append(content(out))
    assert contents[0]["model.safetensors"] != contents[1]["model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["iteration_5"]
    shutil.copytree(mine, tmp_path / "copy")  # with the run's id
    for other, run_id in ((tmp_path / "copy", RUN), (tmp_path / "another", ANOTHER)):
        save_at(other, 5, run_id)
        exports = Exports(other, out.parent)
        exports.resumed(5)
        exports.finish(lambda: False)
        assert content(out) == contents[1]
        assert f"{out}: is an export of another run, and nothing is overwritten" in exports.notices[5]
        command = shlex.split(caplog.messages[-1].split("to export it: ")[1])
        assert hf_convert.main(command[1:]) == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["iteration_5", "iteration_5_2", "iteration_5_3"]


@pytest.mark.usefixtures("forked")
def test_what_earlier_starts_owe_comes_after_the_newest_and_stays(exports: Exports, saved: Path) -> None:
    """Of the checkpoints up to the step from which the run goes on, those without an export of that very checkpoint."""
    shutil.copytree(saved / "global_step5", exports.directory / "iteration_5")  # something else
    exports.resumed(12)
    assert exports.in_use == {saved / "global_step5", saved / "global_step10"}
    exports.saving(15)
    exports.committed(15)
    assert exports.in_use == {saved / f"global_step{step}" for step in STEPS}
    exports.finish(lambda: False)
    assert [exports.notices[step][:12] for step in STEPS] == ["not exported", "exported in ", "exported in "]
    assert list(exports.notices) == [5, 15, 10] and not exports.in_use
    assert f"{exports.directory / 'iteration_5'}: is no export" in exports.notices[5]


def test_a_training_without_descriptors_goes_on(
    exports: Exports, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    exports.saving(5)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        exports.committed(5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert list(exports.notices) == [5] and exports.in_use == {saved / "global_step5"}
    assert exports.notices[5].startswith("not exported: [Errno 24] Too many open files: ")
    assert "it is tried again after the next export" in exports.notices[5]
    assert "iteration 5 was not exported: [Errno 24] Too many open files" in caplog.text


@pytest.mark.usefixtures("forked")
def test_an_export_may_say_more_than_a_pipe_takes(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("print('x' * (1 << 20))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    exports.committed(5)
    exports.finish(lambda: False)
    assert exports.notices[5].startswith("exported in ")


@pytest.mark.usefixtures("forked")
def test_one_runs_the_newest_waits_and_a_stop_waits_for_none(
    exports: Exports, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    for name, value in Held(tmp_path).environment.items():
        monkeypatch.setenv(name, value)
    for step in (*STEPS, 16, 20):
        exports.saving(step)
        if step == 20:
            exports.failed(step)
        else:
            exports.committed(step)
    assert exports.in_use == {saved / "global_step5", saved / "global_step15"}
    assert list(exports.notices) == [10]
    exports.poll()
    assert len(exports.processes) == 1
    exports.finish(lambda: True)
    assert not exports.processes and not list(exports.directory.glob("*"))
    assert exports.in_use == {saved / "global_step5", saved / "global_step15"}, "the next start exports them"
    assert list(exports.notices) == [10, 5, 15]
    command = shlex.split(caplog.messages[-1].split("to export it: ")[1])
    assert command[0] == "hf-convert" and hf_convert.main(command[1:]) == 0
    assert (exports.directory / "iteration_15" / "config.json").is_file()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("exports", [0], indirect=True)
def test_an_export_that_takes_too_long_leaves_nothing(
    exports: Exports, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, exports.directory)
    for name, value in held.environment.items():
        monkeypatch.setenv(name, value)
    exports.saving(5)
    exports.committed(5)
    held.wait(5)
    exports.finish(lambda: False)
    assert not exports.processes and not list(exports.directory.iterdir())
    assert exports.notices == {5: "not exported: --export-hf-wait 0 s were over"}
    assert exports.in_use == {saved / "global_step5"}, "the next start exports it"


@pytest.mark.usefixtures("forked")
def test_an_export_that_cannot_be_made_says_why(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    (tmp_path / "models").write_text("a file")
    exports = Exports(saved, tmp_path / "models")
    exports.committed(5)
    exports.finish(lambda: False)
    assert "iteration 5 was not exported: exit status 3" in caplog.text and str(tmp_path / "models") in caplog.text
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("forked")
def test_a_checkpoint_whose_export_storage_has_failed_stays_for_the_next_start(exports: Exports, saved: Path) -> None:
    """Only the last: where every export fails, checkpoints would fill --save."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (5, 10):
        exports.saving(step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            exports.committed(step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        exports.finish(lambda: False)
        assert exports.notices[step].startswith("not exported: exit status 3") and "too large" in exports.notices[step]
        assert exports.in_use == {saved / f"global_step{step}"}
    exports.resumed(10)
    exports.finish(lambda: False)
    assert not exports.in_use and sorted(path.name for path in exports.directory.iterdir()) == [
        "iteration_10", "iteration_5",
    ]  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("by_hand", [False, True])
def test_no_start_that_resumes_is_refused_for_what_is_among_its_exports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by_hand: bool
) -> None:
    """Its own it knows, of a copied checkpoint too, and after the directory of checkpoints was renamed."""
    mine, models = tmp_path / "save", tmp_path / "models"
    save_at(mine, 5, ANOTHER)
    ownership = claim(mine, "", take_over=False)
    ownership.release()
    if by_hand:
        assert hf_convert.main(["export", "--load", str(mine), "--out", str(models / "iteration_5")]) == 0
    else:
        exports = Exports(mine, models, run_id=ownership.run_id)
        exports.resumed(5)
        exports.finish(lambda: False)
    assert (models / "iteration_5" / "source.json").is_file()

    def start(save: Path) -> list[str]:
        caplog.clear()
        words = f"{START} --save {save} --load {save} --export-hf-dir {models}"
        check_exports(config_from_args(parse_args(words.split(), {}), {}))
        return [message.partition(": is there, and not of this run")[0] for message in caplog.messages]

    assert start(mine) == []
    save_at(mine, 10)
    shutil.rmtree(mine / "global_step5")
    in_the_way = f"--export-hf-dir {models / 'iteration_5'}"
    assert start(mine) == ([in_the_way] if by_hand else [])
    mine.rename(tmp_path / "renamed")
    assert start(tmp_path / "renamed") == [in_the_way], "which cannot be told from that of a copy"
    with pytest.raises(ConfigError, match=f"^{in_the_way}: is there, and not of this run, which would export to it"):
        start(tmp_path / "new")


@pytest.mark.usefixtures("forked")
def test_an_export_that_was_killed_is_tried_again_after_one_that_succeeds(
    exports: Exports, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by the kernel that is out of memory. After three times its checkpoint is given up, which is said."""
    held = Held(tmp_path, exports.directory)
    for name, value in held.environment.items():
        monkeypatch.setenv(name, value)

    def kill(step: int) -> None:
        held.wait(step)
        (process,) = exports.processes
        process.kill()
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE, "the end of the export")
        exports.poll()

    exports.saving(5)
    exports.committed(5)
    kill(5)
    assert "exit status -9" in exports.notices[5] and "it is tried again after the next export" in exports.notices[5]
    exports.poll()
    assert not exports.processes and exports.in_use == {saved / "global_step5"}
    held.release()
    exports.saving(10)
    exports.committed(10)
    exports.finish(lambda: False)
    assert list(exports.notices) == [5, 10] and exports.notices[5].startswith("exported in ") and not exports.in_use
    assert sorted(path.name for path in exports.directory.iterdir()) == ["iteration_10", "iteration_5"]


@pytest.mark.usefixtures("forked", "small_files")
def test_a_checkpoint_that_is_given_up_is_named(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After three tries, or when a later one failed, too; --keep-last removes it then."""
    for order in ((5, 5, 5), (5, 10)):
        exports = Exports(saved, tmp_path / "models", keep_last=1)
        for step in order:
            exports.saving(step)
            exports.committed(step)
            exports.finish(lambda: False)
        assert exports.in_use == {saved / f"global_step{step}" for step in set(order) - {5}}
        why = "it was tried 3 times" if order[-1] == 5 else "that of iteration 10 failed, too"
        assert exports.notices[5].endswith(f"{why}; a later save removes its checkpoint (--keep-last 1)")
        assert "; a later save removes its checkpoint (--keep-last 1); to export it: hf-convert" in caplog.text
