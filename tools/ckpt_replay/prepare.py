"""Before anything is measured: which engines can run here, and what each rank holds.

In a process of its own, since it imports every engine.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.engines.errors import EngineUnavailableError, UnknownEngineError
from megatron.config import ConfigError

from .plan import (
    CONNECTOR,
    IN_MEMORY,
    MEMORY_PEER,
    RAW,
    Preparation,
    ReplayError,
    Request,
    checkpoint_flags,
    state_file,
)


def prepare(path: Path) -> None:
    """Read a pickled Preparation from the file `path`, and leave the answer beside it in answer.json.

    The answer: `problems` (engine -> why it cannot run here) and `bytes` (those of the tensors of each process's
    rank), or `error`.
    """
    asked: Preparation = pickle.loads(path.read_bytes())
    try:
        answer = {"problems": engine_problems(asked.request), "bytes": plan_states(asked)}
    except (ReplayError, UnknownEngineError, ValueError) as exc:
        answer = {"error": str(exc)}
    path.with_name("answer.json").write_text(json.dumps(answer))


def engine_problems(request: Request) -> dict[str, str]:
    """Of the engines that cannot save from this machine to that place: why. Raises UnknownEngineError."""
    problems: dict[str, str] = {}
    for name in request.engines:
        try:
            if name == CONNECTOR or name in RAW:
                why = _problem_of_stand_in(name, request.in_object_storage)
            elif name in IN_MEMORY:
                why = _problem_of_memory(name, request)
            else:
                if request.in_object_storage:
                    checkpoint_flags(request.directory, request.options, name)
                why = unavailable_engines([name]).get(name)
        except ConfigError as exc:
            why = str(exc)
        if why is not None:
            problems[name] = why
    return problems


def unavailable_engines(names: Sequence[str]) -> dict[str, str]:
    """Of the engines that cannot save on this machine, or have nothing to save: why. Raises UnknownEngineError."""
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


def _problem_of_stand_in(name: str, in_object_storage: bool) -> str | None:
    """Of what takes the place of an engine."""
    if name != CONNECTOR:
        return f"engine {name} writes files: give it a --dir of a file system" if in_object_storage else None
    if not in_object_storage:
        return f"engine {name} writes to object storage alone: give --dir s3://BUCKET/PREFIX"
    if importlib.util.find_spec("s3torchconnector") is None:
        install = "pip install 'megatron-restart[s3torchconnector]'"
        return f"engine {name}: package s3torchconnector is not installed; install it ({install})"
    return None


def _problem_of_memory(name: str, request: Request) -> str | None:
    """Of saves in host memory."""
    import torch

    if request.in_object_storage:
        return f"engine {name}: saves go to host memory, and to no bucket; give it a --dir of a file system"
    if torch.cuda.is_available():
        return f"engine {name}: slots are inherited by forked processes, and CUDA survives no fork; hide the GPUs"
    if name == MEMORY_PEER and request.options["checksum"] == "none":
        return f"engine {name}: no copy is taken that cannot be verified; leave --checksum none out"
    return None


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
