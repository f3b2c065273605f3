"""Before anything is measured: which engines can run here, and what each rank holds.

In a process of its own, since it imports every engine.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from megatron.checkpointing.engines.errors import EngineUnavailableError, UnknownEngineError

from .plan import RAW, Preparation, ReplayError, state_file


def prepare(path: Path) -> None:
    """Read a pickled Preparation from the file `path`, and leave the answer beside it in answer.json.

    The answer: `problems` (engine -> why it cannot run here) and `bytes` (those of the tensors of each process's
    rank), or `error`.
    """
    asked: Preparation = pickle.loads(path.read_bytes())
    try:
        answer = {"problems": engine_problems(asked.request.engines), "bytes": plan_states(asked)}
    except (ReplayError, UnknownEngineError, ValueError) as exc:
        answer = {"error": str(exc)}
    path.with_name("answer.json").write_text(json.dumps(answer))


def engine_problems(names: tuple[str, ...]) -> dict[str, str]:
    """Of the engines that cannot save on this machine: why. Raises UnknownEngineError."""
    from megatron.checkpointing.engines.base import EngineOptions
    from megatron.checkpointing.engines.registry import create_engine, engine_class

    problems: dict[str, str] = {}
    for name in (name for name in names if name not in RAW):
        try:
            if not engine_class(name).writes_files:
                problems[name] = f"engine {name} writes no files, so there is nothing to replay"
                continue
            engine = create_engine(name, EngineOptions())
            try:
                engine.check_can_save()
            finally:
                engine.close()
        except EngineUnavailableError as exc:
            problems[name] = str(exc)
    return problems


def plan_states(asked: Preparation) -> list[int]:
    """Write the planned state of each process into the notes; bytes of the tensors of each."""
    import torch

    from .shares import planned_share, tensor_bytes

    found = []
    for process in asked.processes:
        planned = planned_share(asked.request.share, asked.request.share.ranks[process])
        torch.save(planned, state_file(asked.notes, process))
        found.append(tensor_bytes(planned.files))
    return found
