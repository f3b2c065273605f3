"""Finds out before the measurements which engines can run here, and plans the state of each rank.

Runs in a separate process, since it imports every engine.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.engines.errors import EngineUnavailableError, UnknownEngineError
from megatron.checkpointing.engines.registry import check_engine_name
from megatron.config import ConfigError
from megatron.config.uris import URI_FORM
from megatron.fileio import compressed_blocks
from restart_trace.devices import available_accelerator

from .plan import (
    CONNECTOR,
    IN_MEMORY,
    LAZY_SHARED,
    LAZY_ZSTD,
    LIBRARIES,
    MEMORY_PEER,
    RAW,
    TORCH_CHECKPOINTING,
    Preparation,
    ReplayError,
    Request,
    state_file,
)

_LEAST_PART, _MOST_PART = 5, 5 << 10  # MiB, of S3ClientConfig.part_size
_OWN_FILES = (*RAW, *IN_MEMORY, TORCH_CHECKPOINTING)  # of each process, so that no other one can load them


def prepare(path: Path) -> None:
    """Read a pickled Preparation from the file `path`, and write the answer to answer.json in the same directory.

    The answer: `problems` (engine -> why it cannot run here) and `bytes` (of the tensors of each process's rank), or
    `error`.
    """
    asked: Preparation = pickle.loads(path.read_bytes())
    try:
        answer = {"problems": engine_problems(asked.request), "bytes": plan_states(asked)}
    except (ReplayError, UnknownEngineError, ValueError) as exc:
        answer = {"error": str(exc)}
    path.with_name("answer.json").write_text(json.dumps(answer))


def engine_problems(request: Request) -> dict[str, str]:
    """Engine -> why it cannot save from this machine to the request's directory. Raises UnknownEngineError."""
    problems: dict[str, str] = {}
    for name in request.engines:
        try:
            if request.share.copies > 1 and name in _OWN_FILES:
                why = f"engine {name}: each process has files of its own; leave it out, or drop --copies"
            elif name in (*LIBRARIES, *RAW, LAZY_SHARED):
                why = _problem_of_stand_in(name, request)
            elif name == LAZY_ZSTD:
                why = _problem_of_lazy_zstd()
            elif name in IN_MEMORY:
                why = _problem_of_memory(name, request)
            else:
                check_engine_name(name, in_object_storage=request.in_object_storage)
                why = unavailable_engines([name]).get(name)
        except (ConfigError, EngineUnavailableError) as exc:
            why = str(exc)
        if why is not None:
            problems[name] = why
    return problems


def unavailable_engines(names: Sequence[str]) -> dict[str, str]:
    """Engine -> why it cannot save on this machine, or has nothing to save. Raises UnknownEngineError."""
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


def _problem_of_stand_in(name: str, request: Request) -> str | None:
    """Why what takes the place of an engine cannot run here; None if it can."""
    if name != CONNECTOR and request.in_object_storage:
        return f"engine {name} writes files: give it a --dir of a file system"
    if name == CONNECTOR and not request.in_object_storage:
        return f"engine {name} writes to object storage only: give --dir {URI_FORM}"
    if name == CONNECTOR and not _LEAST_PART <= (part := request.options["io_block_size"]) <= _MOST_PART:
        return f"engine {name}: --io-block-size {part:g}: its parts have {_LEAST_PART} to {_MOST_PART} MiB; change that"
    package, install = LIBRARIES.get(name) or (None, "")
    if package is not None and importlib.util.find_spec(package) is None:
        return f"engine {name}: package {package} is not installed; install it ({install})"
    return None


def _problem_of_lazy_zstd() -> str | None:
    """Why no compressed files can be written here; None if they can."""
    if compressed_blocks.is_available():
        return None
    package = compressed_blocks.PACKAGE
    return f"engine {LAZY_ZSTD}: package {package} is not installed; install it (pip install {package})"


def _problem_of_memory(name: str, request: Request) -> str | None:
    """Why saves in host memory cannot be replayed here; None if they can."""
    import torch  # noqa: F401 - asked below

    if request.in_object_storage:
        return f"engine {name}: saves go to host memory, not to a bucket; give it a --dir of a file system"
    if available_accelerator() is not None:
        return f"engine {name}: slots are inherited by forked processes, which cannot use devices; hide the GPUs"
    if name == MEMORY_PEER and request.options["checksum"] == "none":
        return f"engine {name}: copies must be verifiable; drop --checksum none"
    return None


def plan_states(asked: Preparation) -> list[int]:
    """Write the planned state of each process to the directory `notes`; returns the bytes of the tensors of each."""
    import torch

    from .shares import planned_share, tensor_bytes

    found = []
    for process in asked.processes:
        planned = planned_share(asked.request.share, asked.request.share.ranks[process])
        torch.save(planned, state_file(asked.notes, process))
        found.append(tensor_bytes(planned.files))
    return found
