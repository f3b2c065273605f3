"""Before anything is measured: which engines can run here, and what each rank holds.

In a process of its own, since it imports every engine.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron.checkpointing.engines.errors import EngineUnavailableError, UnknownEngineError

from .plan import ReplayError, Request, request_of, state_file


def prepare(path: Path) -> None:
    """Read `request`, `notes` and `processes` from the file `path`, and leave the answer beside it in answer.json.

    The answer: `problems` (engine -> why it cannot run here) and `bytes` (those of the tensors of each process's
    rank), or `error`.
    """
    asked = json.loads(path.read_text())
    request, notes = request_of(asked["request"]), Path(asked["notes"])
    try:
        answer = {
            "problems": engine_problems(request.engines),
            "bytes": plan_states(request, notes, asked["processes"]),
        }
    except (ReplayError, UnknownEngineError, ValueError) as exc:
        answer = {"error": str(exc)}
    path.with_name("answer.json").write_text(json.dumps(answer))


def engine_problems(names: tuple[str, ...]) -> dict[str, str]:
    """Of the engines that cannot save on this machine: why. Raises UnknownEngineError."""
    from megatron.checkpointing.engines.base import EngineOptions
    from megatron.checkpointing.engines.registry import create_engine, engine_class

    problems: dict[str, str] = {}
    for name in names:
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


def plan_states(request: Request, notes: Path, processes: list[int]) -> list[int]:
    """Write the planned state of each of `processes` into `notes`; bytes of the tensors of each."""
    import torch

    from .shares import planned_share, tensor_bytes

    found = []
    for process in processes:
        planned = planned_share(request.share, request.share.ranks[process])
        torch.save(planned, state_file(notes, process))
        found.append(tensor_bytes(planned.files))
    return found
