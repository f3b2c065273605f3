"""Engine `lazy` in trainers of others: what they save so, they go on from, bit for bit, wherever they are killed."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from megatron.adapters.deepspeed_engine import convert_to_torch
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from tests.dist.harness import ROOT, Run, Zygote, kill_all, wait_for

SCRIPTS = Path(__file__).parent / "scripts" / "clients"
RUNNER = str(ROOT / "megatron" / "adapters" / "__main__.py")
RANKS, STEPS = 2, 6
LAZY = {"CHECKPOINT": json.dumps({"engine": {"type": "lazy"}})}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly(minutes=2)) for seed in range(1, 12))]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Client:
    """A script as its users write it, with the words before its number of steps.

    `killed_within_s`: after a step is told, longer than the save that may follow takes.
    """

    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    killed_within_s: float = 0.05


CLIENTS = {
    "dcp": Client((str(SCRIPTS / "fsdp_lazy.py"), "save"), {"ONE_PLACE": "1"}),
    "dcp-async": Client((str(SCRIPTS / "fsdp_lazy.py"), "async_save")),
    "dcp-async-in-place": Client((str(SCRIPTS / "fsdp_lazy.py"), "async_save"), {"ONE_PLACE": "1"}),
    "deepspeed": Client((RUNNER, str(SCRIPTS / "plain_deepspeed.py"), "ordinary"), LAZY),
    "deepspeed-pipeline": Client((RUNNER, str(SCRIPTS / "plain_deepspeed.py"), "pipeline"), LAZY),
    "trainer": Client((str(SCRIPTS / "hf_resumed.py"), "1"), LAZY, killed_within_s=0.3),
    "trainer-zero3": Client((str(SCRIPTS / "hf_resumed.py"), "3"), LAZY, killed_within_s=0.3),
}


def clients(*in_suite: str, but: str | None = None) -> list[Any]:
    """The names of all clients but this one, as parameters of a test; those that are not `in_suite` are nightly."""
    nightly = pytest.mark.nightly(minutes=2)
    return [pytest.param(name, marks=() if name in in_suite else nightly) for name in CLIENTS if name != but]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Zygote]:
    started = Zygote.start(
        imports=(
            "torch.distributed.checkpoint", "torch.distributed.fsdp", "megatron.adapters.dcp",
            "megatron.adapters.deepspeed_engine", "transformers.trainer", "transformers.models.llama.modeling_llama",
            "accelerate",
        )
    )  # fmt: skip
    yield started
    started.close()


@dataclass(frozen=True)
class Job:
    """A client in its directory."""

    zygote: Zygote
    client: Client
    directory: Path

    def run(self, steps: int, nproc: int = RANKS, during: Callable[[list[int]], None] | None = None) -> Run:
        self.directory.mkdir(exist_ok=True)
        words = [str(self.directory), "-", *self.client.words, str(steps)]
        env = {"WIDTH": "128", "LOCAL_SIZE": str(nproc), **self.client.env}
        logs, script = self.directory.parent / "logs", str(SCRIPTS / "hooked.py")
        return self.zygote.run(words, nproc, logs, env=env, script=script, during=during)


def losses(run: Run) -> dict[int, str]:
    """Step -> loss with all its digits, of rank 0."""
    found = re.findall(r"^step (\d+) loss (\S+)", run.log(), re.MULTILINE)
    return {int(step): loss for step, loss in found}


@pytest.fixture(scope="module")
def references(ranks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The losses of each client that is never stopped, once they are asked for."""
    return {}


def reference(name: str, job: Job, known: dict[str, dict[int, str]]) -> dict[int, str]:
    if name not in known:
        run = Job(job.zygote, job.client, job.directory.with_name("reference")).run(STEPS)
        assert run.ok, run.output[-3000:]
        known[name] = losses(run)
        assert sorted(known[name]) == list(range(1, STEPS + 1))
    return known[name]


# How a step is saved and loaded differs between DCP's two calls, DeepSpeed's engine, and the Trainer around that.
@pytest.mark.parametrize("name", clients("dcp", "dcp-async", "deepspeed", "trainer"))
def test_a_resumed_job_has_the_losses_of_one_that_was_never_stopped(
    name: str, ranks: Zygote, references: dict[str, dict[int, str]], tmp_path: Path
) -> None:
    job = Job(ranks, CLIENTS[name], tmp_path / "job")
    expected = reference(name, job, references)
    first = job.run(4)
    assert first.ok, first.output[-3000:]
    second = job.run(STEPS)
    assert second.ok, second.output[-3000:]
    assert losses(first) == {step: expected[step] for step in range(1, 5)}
    assert losses(second) == {step: expected[step] for step in (5, 6)}
    left = [path.name for path in tmp_path.rglob("*") if path.suffix in (".lazy", ".tmp", ".incomplete")]
    assert left == []


@pytest.mark.parametrize("seed", SEEDS)
# What is renamed when differs between saves to new places and to the same one, and DeepSpeed's.
@pytest.mark.parametrize("name", clients("dcp-async", "dcp-async-in-place", "deepspeed", but="dcp"))
def test_a_job_that_is_killed_at_any_instant_goes_on(
    name: str, seed: int, ranks: Zygote, references: dict[str, dict[int, str]], tmp_path: Path
) -> None:
    """From the newest checkpoint that was complete, or the one before; with the losses of a job that was not killed."""
    job = Job(ranks, CLIENTS[name], tmp_path / "job")
    expected = reference(name, job, references)
    draw = random.Random(f"{name} {seed}")
    step = draw.choice(range(2, STEPS + 1))

    def kill(pids: list[int]) -> None:
        log = max((tmp_path / "logs").glob("run_*")) / "rank_0.log"
        wait_for(lambda: log.exists() and f"step {step} loss" in log.read_text(), f"step {step}")
        time.sleep(draw.uniform(0, job.client.killed_within_s))
        kill_all(pids)

    killed = job.run(STEPS, during=kill)
    assert set(killed.exit_codes) <= {-signal.SIGKILL, 0}
    reached = max(losses(killed))
    resumed = job.run(STEPS)
    assert resumed.ok, resumed.output[-3000:]
    again = losses(resumed)
    assert again == {step: expected[step] for step in again}
    begun = min(again, default=STEPS + 1)
    # All saves but the last two are complete: the next one waits for a save.
    assert (begun - 1) % 2 == 0 and begun - 1 >= reached // 2 * 2 - 4
    assert sorted(again) == list(range(begun, STEPS + 1))


@pytest.mark.parametrize("name", ["dcp-async", "deepspeed"])
def test_damage_is_found_and_the_file_named(name: str, ranks: Zygote, tmp_path: Path) -> None:
    job = Job(ranks, CLIENTS[name], tmp_path / "job")
    assert job.run(2).ok
    pattern = "rank_00001_*.safetensors" if name == "dcp-async" else "bf16_zero_pp_rank_1_*.pt"
    (path,) = job.directory.rglob(pattern)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    run = job.run(4)
    assert not run.ok and losses(run) == {}
    assert re.search(rf"CheckpointDamagedError: \S*{re.escape(path.name)}: tensor", run.output), run.output[-3000:]
    path.write_bytes(content[:-1])
    assert re.search(rf"{re.escape(path.name)}: {len(content) - 1} bytes, but", job.run(4).output)


def test_checkpoints_of_torch_save_are_loaded_and_made(ranks: Zygote, tmp_path: Path) -> None:
    """A job that saved with torch.save goes on with the engine; `to-torch` makes of it what torch.save would."""
    words = (RUNNER, str(SCRIPTS / "plain_deepspeed.py"), "ordinary")
    by_torch, lazy = Job(ranks, Client(words), tmp_path / "torch"), Job(ranks, Client(words, LAZY), tmp_path / "lazy")
    assert by_torch.run(2).ok
    shutil.copytree(by_torch.directory, lazy.directory)
    runs = [job.run(4) for job in (by_torch, lazy)]
    assert losses(runs[0]) == losses(runs[1]) and sorted(losses(runs[0])) == [3, 4]
    saved = lazy.directory / "checkpoints" / "global_step4"
    names = convert_to_torch(saved, tmp_path / "converted" / "global_step4")
    assert len(names) == RANKS + 1
    weights: list[Any] = [
        get_fp32_state_dict_from_zero_checkpoint(directory, tag="global_step4")
        for directory in (by_torch.directory / "checkpoints", tmp_path / "converted")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    (saved / names[0]).write_bytes((saved / names[0]).read_bytes()[:-1])
    with pytest.raises(CheckpointDamagedError, match=names[0]):
        convert_to_torch(saved, tmp_path / "again")


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(ranks: Zygote, tmp_path: Path) -> None:
    job = Job(ranks, CLIENTS["dcp-async"], tmp_path / "job")
    first = job.run(4)
    assert first.ok
    shutil.rmtree(job.directory / "checkpoints" / "4")
    alone = job.run(4, nproc=1)
    assert alone.ok, alone.output[-3000:]
    assert "resumed 2" in alone.log()
    assert {step: float(loss) for step, loss in losses(alone).items()} == pytest.approx(
        {step: float(losses(first)[step]) for step in (3, 4)}, rel=1e-5
    )


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.nightly(minutes=1))])
def test_the_trainer_of_hugging_face_goes_on_from_it(stage: int, ranks: Zygote, tmp_path: Path) -> None:
    """It saves, makes another model, and goes on with that: by itself, and with torch.save, the losses are the same."""
    words = (RUNNER, str(SCRIPTS / "hf_trainer.py"), "2")
    job = Job(ranks, Client(words, LAZY), tmp_path / "job")
    by_torch = Job(ranks, Client(words), tmp_path / "torch")
    run, other = job.run(stage), by_torch.run(stage)  # the client's last argument is its stage
    assert run.ok and other.ok, run.output[-3000:]
    assert losses(run) == losses(other) and sorted(losses(run)) == [1, 2, 3]
    (manifest,) = (job.directory / "checkpoints" / "checkpoint-2").rglob("lazy_manifest.json")
    files = json.loads(manifest.read_text())["files"]
    assert sorted(files) == sorted(path.name for path in manifest.parent.glob("*.pt"))
    assert not list(by_torch.directory.rglob("lazy_manifest.json"))
