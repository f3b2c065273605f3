"""--export-hf-interval in trainings: what is exported meanwhile, what --keep-last leaves, and what kills leave."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from megatron.checkpointing.store.ownership import claim
from megatron.parallel.topology import Layout
from megatron.training.hf_exports import NOTICE
from tests.dist.harness import Zygote, kill_all, records, runs, wait_for
from tests.dist.light_starts import IMPORTS, light_starts
from tests.dist.test_hf import STYLES, TRAINING
from tests.dist.tiny_runs import SINGLE, Launcher, parallel
from tools import hf_convert

pytestmark = pytest.mark.usefixtures("own_environment")
FLAGS = [*STYLES["gpt2"], *TRAINING, "--checkpoint-durability", "none"]
# Holds an export when its weights are written, until the file RELEASED is there: Python runs this at the start of each
# process that has its directory in PYTHONPATH.
HOLD = """
import os, sys, time
class Hold:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.hf.exporting":
            sys.meta_path.remove(self)
            from megatron.hf import tokenizers
            write = tokenizers.write_tokenizer
            def held(*arguments):
                while not os.path.exists(os.environ["RELEASED"]):
                    time.sleep(0.01)
                return write(*arguments)
            tokenizers.write_tokenizer = held
sys.meta_path.insert(0, Hold())
"""


class Held:
    """Exports that are held. `environment`: of the training; `save`: its directory; `models`: of the exports."""

    def __init__(self, directory: Path, models: Path | None = None) -> None:
        self.save, self._released = directory / "save", directory / "released"
        self._models = models or self.save / "hf"
        (directory / "path").mkdir()
        (directory / "path" / "sitecustomize.py").write_text(HOLD)
        path = os.pathsep.join(filter(None, (str(directory / "path"), os.environ.get("PYTHONPATH"))))
        self.environment = {"PYTHONPATH": path, "RELEASED": str(self._released)}

    def wait(self, step: int) -> None:
        """Until the export of `step` has written its weights."""
        wait_for(lambda: bool(self.unfinished(step)), f"the export of iteration {step}")

    def unfinished(self, step: int) -> list[Path]:
        return list(self._models.glob(f".incomplete_iteration_{step}_*/generation_config.json"))

    def release(self) -> None:
        self._released.touch()

    def saving(self, interval: int, export_interval: int) -> list[str]:
        intervals = ["--save-interval", str(interval), "--export-hf-interval", str(export_interval)]
        return ["--save", str(self.save), "--load", str(self.save), *intervals]


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


def exported(save: Path) -> dict[str, bytes]:
    """Name in the directory of exports -> content."""
    return {
        str(path.relative_to(save / "hf")): path.read_bytes() for path in (save / "hf").rglob("*") if path.is_file()
    }


def by_hand(save: Path, step: int, out: Path) -> dict[str, bytes]:
    words = ["--load", str(save), "--load-tag", f"global_step{step}", "--out", str(out / f"iteration_{step}")]
    assert hf_convert.main(["export", *words]) == 0
    return {str(path.relative_to(out)): path.read_bytes() for path in (out / f"iteration_{step}").iterdir()}


def exporters(rank: int) -> list[psutil.Process]:
    return psutil.Process(rank).children()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "lazy"])
def test_a_training_goes_on_beside_its_exports(
    zygote: Zygote, dataset: list[str], tmp_path: Path, held: Held, engine: str
) -> None:
    """--keep-last leaves those that are exported, or wait for it, and removes the others; these, too, in the end.

    With one engine the exports begin as users begin them; those of the other tests are forked (forked_writers.py).
    """
    save, there = held.save, list[str]()
    hand = dict[str, bytes]()

    def during(pids: list[int]) -> None:
        held.wait(2)
        wait_for(lambda: (save / "global_step4" / "manifest.json").is_file(), "the last save")
        wait_for(lambda: not (save / "global_step3").exists(), "the removal of what is too old")
        assert exporters(pids[0])[0].nice() == 19
        there.extend(path.name for path in save.glob("global_step*"))
        hand.update(by_hand(save, 2, tmp_path / "hand"))
        held.release()

    flags = [*FLAGS, *held.saving(1, 2), "--keep-last", "1", "--checkpoint-engine", engine, "--train-iters", "4"]
    run = Launcher(zygote, dataset, tmp_path).train(
        Layout(2, 1, 1), *flags, during=during, env=held.environment, forked_writers=engine != "torch"
    )
    assert sorted(there) == ["global_step2", "global_step4"]
    assert "waiting for the export of iteration 2" in run.log()
    assert exported(save) == hand | by_hand(save, 4, tmp_path / "hand")
    assert [path.name for path in save.glob("global_step*")] == ["global_step4"]
    notices = [r for r in records(save / "restart_trace", 0, 0) if r.get("phase") == NOTICE]
    assert [(r["step"], r["detail"][:12]) for r in notices] == [(2, "exported in "), (4, "exported in ")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_export_ends_with_its_training_and_the_next_start_makes_it(
    zygote: Zygote, dataset: list[str], tmp_path: Path, held: Held, number: signal.Signals
) -> None:
    """SIGTERM goes to all processes of the job, and the training, which is at its end, does not wait any longer."""
    save, launcher = held.save, Launcher(zygote, dataset, tmp_path)
    flags = [*FLAGS, *held.saving(2, 2), "--train-iters", "2", "--exit-signal-handler"]

    def during(pids: list[int]) -> None:
        held.wait(2)
        (process,) = exporters(pids[0])
        if number == signal.SIGKILL:
            kill_all(pids)
        else:
            process.send_signal(number)
            os.kill(pids[0], number)
        wait_for(lambda: not runs(process.pid), "the end of the export")

    run = launcher.run(SINGLE, *flags, during=during, env=held.environment)
    assert run.exit_codes == [0 if number == signal.SIGTERM else -signal.SIGKILL], run.output[-4000:]
    told = f"to export it: hf-convert export --load {save} --load-tag global_step2 --out {save}/hf/iteration_2"
    assert (told in run.log()) == (number == signal.SIGTERM), run.output[-4000:]
    assert not (save / "hf" / "iteration_2").exists()
    launcher.train(SINGLE, *flags)
    assert exported(save) == by_hand(save, 2, tmp_path / "hand")
    assert [path.name for path in (save / "hf").iterdir()] == ["iteration_2"]


@pytest.mark.slow
@pytest.mark.parametrize("spelled", [pytest.param("{save}", marks=pytest.mark.nightly(minutes=1)), "{save}/../save"])
def test_what_a_killed_training_owes_is_exported_by_the_next_start(
    zygote: Zygote, dataset: list[str], tmp_path: Path, held: Held, spelled: str
) -> None:
    """However --load is spelled; --keep-last leaves these checkpoints until then."""
    save, launcher = held.save, Launcher(zygote, dataset, tmp_path)
    flags = [*FLAGS, *held.saving(1, 2), "--keep-last", "1"]

    def during(pids: list[int]) -> None:
        held.wait(2)
        wait_for(lambda: (save / "global_step4" / "manifest.json").is_file(), "the last save")
        kill_all(pids)

    launcher.run(SINGLE, *flags, "--train-iters", "4", during=during, env=held.environment)
    assert not list(save.glob("hf/iteration_*"))
    launcher.train(SINGLE, *flags, "--load", spelled.format(save=save), "--train-iters", "5")
    assert sorted(path.name for path in (save / "hf").iterdir()) == ["iteration_2", "iteration_4"]
    assert [path.name for path in save.glob("global_step*")] == ["global_step5"]
    notices = [r for r in records(save / "restart_trace", 1, 0) if r.get("phase") == NOTICE]
    assert [r["step"] for r in notices] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.nightly(minutes=1)), "taken over", "too long"]
)
def test_what_happens_while_a_training_waits_for_its_last_export_does_not_fail_it(
    zygote: Zygote, dataset: list[str], tmp_path: Path, held: Held, what: str
) -> None:
    """All is trained and saved. What is not exported leaves nothing behind."""
    save, launcher = held.save, Launcher(zygote, dataset, tmp_path)
    flags = [*FLAGS, *held.saving(2, 2), "--train-iters", "2"]
    claimed = []

    def during(pids: list[int]) -> None:
        if what == "too long":
            return
        held.wait(2)
        (log,) = (tmp_path / "logs").rglob("rank_0.log")
        wait_for(lambda: "waiting for the export of iteration 2" in log.read_text(), "the end of the training")
        if what == "taken over":
            claimed.append(claim(save, "another", take_over=True))
            held.release()
        else:
            os.kill(pids[0], signal.Signals[what])

    more = ["--export-hf-wait", "0.5"] if what == "too long" else []
    run = launcher.run(SINGLE, *flags, *more, during=during, env=held.environment)
    for ownership in claimed:
        ownership.release()
    assert run.exit_codes == [0], run.output[-4000:]
    assert "Traceback" not in run.output
    there = [path.name for path in (save / "hf").iterdir()]
    assert there == (["iteration_2"] if what == "taken over" else [])
    why = "--export-hf-wait 0.5 s were over" if what == "too long" else "the training was ended first"
    assert (f"iteration 2 was not exported: {why}; to export it: " in run.log()) == (what != "taken over")
    (ended,) = [r for r in records(save / "restart_trace", 0, 0) if r.get("phase") == "ended"]
    assert ended.get("detail") is None


def test_what_cannot_be_exported_is_refused_before_the_imports(dataset: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "others" / "iteration_2").mkdir(parents=True)
    (tmp_path / "others" / "iteration_3").mkdir()
    words = [*dataset, *FLAGS, *parallel(SINGLE), "--train-iters", "2", "--save", str(tmp_path / "save")]
    words += ["--save-interval", "1", "--export-hf-interval", "2"]
    tried = {
        "--export-hf-interval 2: --normalization rmsnorm, --swiglu: GPT2LMHeadModel": [
            "--normalization", "rmsnorm", "--swiglu",
        ],
        f"--export-hf-dir {tmp_path / 'file'}: is there and no directory": ["--export-hf-dir", str(tmp_path / "file")],
        f"--export-hf-dir {tmp_path}/file/below: cannot be written to": ["--export-hf-dir", f"{tmp_path}/file/below"],
        f"--export-hf-dir {tmp_path}/others/iteration_2: is there, and not of this run": [
            "--export-hf-dir", str(tmp_path / "others"),
        ],
    }  # fmt: skip
    accepted, *refused = light_starts([words, *([*words, *more] for more in tried.values())])
    assert accepted.exit_code == IMPORTS, accepted.output
    for start, message in zip(refused, tried, strict=True):
        assert start.exit_code == 2 and message in start.output, start.output
