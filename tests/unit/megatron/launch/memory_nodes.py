"""Program of test_memory_kills.py: imports once what a rank with engine `memory` needs, and forks agents.

A line of its input is the number of an agent; the answer is the agent's process id. The ranks, which agents fork, run
`train` below: real engine, agreements, copies and loads, and a state that holds nothing but its step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import EngineOptions, FileState, first_undamaged
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.load.memory import MemorySource
from megatron.checkpointing.save.background import release_before_steps
from megatron.checkpointing.save.writer import CheckpointIdentity, CheckpointWriter, SaveDirectory
from megatron.checkpointing.store.naming import RankPlace
from megatron.launch.agent import Agent
from megatron.launch.cli import parse_arguments
from megatron.parallel.control_plane import control_planes
from megatron.parallel.topology import Layout
from megatron.training.slot_memory import reserve_slots
from restart_trace.recorder import untraced_operation, untraced_recorder
from restart_trace.startup import Preload
from tests.unit.megatron.checkpointing.load.test_memory import config_of

NAME = "layer_01-model_00-model_states.pt"
ELEMENTS = 1 << 19
ANSWERS_S = 300.0


def note(name: str, content: Any) -> None:
    Path(f".{name}").write_text(json.dumps(content))
    os.rename(f".{name}", name)


def train() -> None:
    """One rank: goes on from what is left in memory, saves after every step, and checks each byte that it loads."""
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    rank, local_rank, world_size, on_host, restart = (int(os.environ[name]) for name in names)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    control, commit_control = control_planes(store, rank, world_size, 2, ANSWERS_S)
    options = EngineOptions(
        rank=rank, local_rank=local_rank, local_world_size=on_host, io_block_bytes=1 << 18, io_threads=2,
        peer_timeout_s=ANSWERS_S,
    )  # fmt: skip
    layout = Layout(1, 1, world_size)
    engine = create_engine("memory", options)
    engine.check_can_save()
    place = RankPlace(layout, layout.coordinates(rank), "fp32")
    context = RunContext(config_of(Path.cwd()), place, 8, 8, control, untraced_recorder(), engine, None, True)
    host = SimpleNamespace(layout=layout, rank=rank, coordinates=place.at, device=torch.device("cpu"))
    reserve_slots(SimpleNamespace(context=context), host, ELEMENTS, SimpleNamespace(state={}), untraced_operation())  # pyright: ignore[reportArgumentType]
    weights = torch.zeros(ELEMENTS)
    step, tier = load(context, rank, weights)
    note(f"start_{restart}_{rank}", [os.getpid(), step, tier, os.environ["LABEL"]])
    identity = CheckpointIdentity(layout.as_dict(), {}, place=place.at._asdict())
    writer = CheckpointWriter(engine, control, context.recorder, identity, f"attempt{restart}", commit_control)
    trained = SimpleNamespace(optimizer=SimpleNamespace(step=lambda: weights.fill_(value_of(rank, step))))
    release_before_steps(trained, writer.background, 1, lambda: check_agreement(writer))
    agreed, done = (os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for name in ("agreed", "done"))
    while not control.broadcast(Path("finish").exists()):
        step += 1
        trained.optimizer.step()  # waits for the save of the step before
        os.write(done, f"{restart} {step}\n".encode())
        for save in writer.background.finished():
            assert save.error is None, save.error
            if rank == 0:
                os.write(agreed, f"{restart} {save.step}\n".encode())
        state = [FileState(NAME, {"weights": weights, "step": step})]
        writer.save(SaveDirectory(Path.cwd()), step, lambda state=state: state, on_storage=False)
    writer.background.drain()


def check_agreement(writer: CheckpointWriter) -> None:
    if writer.agreement_lost is not None:
        raise writer.agreement_lost("the ranks have lost each other")


def value_of(rank: int, step: int) -> float:
    return float(step * 16 + rank)


def load(context: RunContext, rank: int, weights: torch.Tensor) -> tuple[int, str]:
    """(step, tier) of the newest save that all ranks have; a byte of another one is an error, which ends the job."""
    tiers: list[str] = []

    class Noted:
        """An operation, as far as a load of a candidate says what it is."""

        def __init__(self) -> None:
            self._op = untraced_operation()

        def label(self, **labels: Any) -> None:
            tiers.append(labels["tier"])

        def __getattr__(self, name: str) -> Any:
            return getattr(self._op, name)

    op: Any = Noted()
    memory, engine = MemorySource(context), context.checkpoint_engine
    for _ in memory.candidates(op)[0]:
        opened = memory.open(op)
        candidate = opened.candidate
        found = first_undamaged(opened.copies(engine, [NAME], [], op), lambda kept: engine.load([NAME], kept, op))[NAME]
        step = found["step"]
        if step != candidate.step or not torch.equal(found["weights"], torch.full_like(weights, value_of(rank, step))):
            note(f"torn_{step}_{rank}", [candidate.step, found["weights"].unique().tolist()[:4]])
            raise AssertionError(f"rank {rank}: the save of step {candidate.step} is not that of one step")
        engine.keep(candidate.save)
        weights.copy_(found["weights"])
        return step, tiers[-1]
    return 0, ""


def main() -> None:
    """Fork agents as they are asked for, and end once there is no input."""
    template = sys.argv[1:]
    while line := sys.stdin.readline():
        number = line.strip()
        pid = os.fork()
        if pid == 0:
            log = os.open(f"agent{number}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["LABEL"] = f"node{number}"
            os._exit(_agent([*template[:-3], "--node-rank", number, *template[-3:]]))
        print(pid, flush=True)
    deadline = time.monotonic() + ANSWERS_S
    while time.monotonic() < deadline:
        try:
            os.wait()
        except ChildProcessError:
            return


def _agent(arguments: list[str]) -> int:
    try:
        return Agent(parse_arguments(arguments), Preload(1, 2, 3)).run()
    except SystemExit as ended:  # in a rank, too
        if ended.code not in (0, None):
            print(ended.code, file=sys.stderr)
        return int(bool(ended.code)) if not isinstance(ended.code, int) else ended.code
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    main()
