"""The DataStates library as engine `datastates` uses it: both of its public interfaces behind one.

`datastates.llm.Checkpointing` is that of branch main of https://github.com/DataStates/datastates-llm,
`datastates.CheckpointEngine` that of its later branch, which DeepSpeed's own adapter expects.

What main does that an adapter must get around, all in datastates/llm/checkpointing.py and datastates/ckpt/src:

- `save` hands the work to a thread and drops the future, so `wait` may find nothing to wait for yet; an exception in
  the thread becomes sys.exit(-1), which ends neither process nor thread and is lost. Here the futures are kept.
- Its threads number memory regions with an unguarded counter; two with one number end the process. Here it has one.
- It opens the file with mode "wb" after its writer thread was started, and that one creates a file that is not there:
  either can cut off what the other has written. Here the file is there from the beginning and is not truncated.
- `wait` waits for the copies off the device, never for the files. One thread writes all files in the order in which
  they were given, so here a small file is given to it last: once that is written, everything is.

What the later branch's state_aggregated_engine does (llm/datastates/engines/engine_state_aggregated.py):

- All that is saved of a rank goes into one file, whose name it makes up, and which is begun by `commit` alone.
- Unless DeepSpeed calls it, each `save` counts as a checkpoint of its own, and `commit` writes the last one. Here it is
  given all states of a rank in one.
- Its `load` is sys.exit(-1), "not yet implemented". Loading here needs no library.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.errors import CheckpointError, EngineUnavailableError
from restart_trace.device_threads import device_selector

GIB = 1 << 30
AGGREGATED = ("engine_type", "state_aggregated_engine")  # an option of the later branch
_INSTALL = (
    "it is not on PyPI: clone https://github.com/DataStates/datastates-llm and install it from there (it needs the "
    "CUDA toolkit and a CUDA build of torch), or use another engine; loading needs neither"
)
_POLL_S = 0.01


class Library(ABC):
    """One instance of the library. Errors of its own, sys.exit included, become OSError."""

    api: str  # the public class that is behind it

    def __init__(self, library: Any) -> None:
        self._library: Any = library
        # Where it opens files for writing, it must not cut off what its writer thread has written already.
        setattr(sys.modules[type(library).__module__], "open", _open_in_place)  # noqa: B010

    def start(self, state: dict[str, Any], path: Path) -> None:
        """Begin to save `state` to `path`, whose tensors the caller keeps alive and unchanged."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        with errors_of_library(f"saving {path}"):
            self._library.save(state, str(path))

    @abstractmethod
    def wait_for_copies(self) -> None:
        """Return when no tensor on a device is needed any more."""

    @abstractmethod
    def wait_for_files(self, directory: Path, deadline: float) -> bool:
        """Wait until the library says that everything is written, at most until `deadline` (time.monotonic).

        Returns whether it is certain that nothing will be written any more.
        """

    def commit(self, tag: str) -> None:
        """Begin to write what has been saved, where the library waits for that."""
        with errors_of_library(f"committing {tag}"):
            self._library.commit(tag)

    def close(self) -> None:
        """Let the library go."""
        self._library = None


class CheckpointingLibrary(Library):
    """`datastates.llm.Checkpointing`."""

    api = "datastates.llm.Checkpointing"

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        library.executor.shutdown(wait=False)
        self._executor = library.executor = _OneThread()

    def wait_for_copies(self) -> None:
        self._executor.finish()
        with errors_of_library("waiting for copies off the device"):
            self._library.wait()

    def wait_for_files(self, directory: Path, deadline: float) -> bool:
        path = directory / ".datastates_last"
        last = torch.arange(1, 513)  # 4 KiB, none of it zero; alive until it is written
        expected = last.numpy().tobytes()
        try:
            self.start({"last": last}, path)
            self.wait_for_copies()
            while not (done := expected in path.read_bytes()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            path.unlink(missing_ok=True)
        return done


class CheckpointEngineLibrary(Library):
    """`datastates.CheckpointEngine`."""

    api = "datastates.CheckpointEngine"

    def wait_for_copies(self) -> None:
        with errors_of_library("waiting for copies off the device"):
            self._library.wait(persist=False)

    def wait_for_files(self, directory: Path, deadline: float) -> bool:
        with errors_of_library("waiting for the files"):
            self._library.wait(persist=True)
        # It keeps all that it ever saved, tensors too, until it is shut down; its own shutdown clears this.
        kept = getattr(self._library, "sm", None)
        if isinstance(kept, dict):
            kept.clear()
        return False  # its versions differ in what they wait for

    def close(self) -> None:
        shutdown = getattr(self._library, "shutdown", None)
        if shutdown is not None:
            with errors_of_library("shutting down"):
                shutdown()
        super().close()


def aggregated_name(rank: int) -> str:
    """What state_aggregated_engine calls the one file of a rank."""
    return f"rank-{rank}-aggregated-datastates.ckpt"


def find_library(options: Mapping[str, Any] | None = None) -> tuple[type[Library], Any]:
    """(how to use it, the library's own class).

    Raises EngineUnavailableError if the package is not installed or cannot be imported, there is no CUDA device, or
    the installed branch does not read `options`, which are of the later one.
    """
    if importlib.util.find_spec("datastates") is None:
        raise EngineUnavailableError(f"--checkpoint-engine datastates: package datastates is not installed; {_INSTALL}")
    if not torch.cuda.is_available():
        raise EngineUnavailableError(
            "--checkpoint-engine datastates: there is no CUDA device here, and saving needs one; use another engine, "
            "or run where there is one; loading needs none"
        )
    reasons = []
    for kind, module in ((CheckpointEngineLibrary, "datastates"), (CheckpointingLibrary, "datastates.llm")):
        try:
            library_class = getattr(importlib.import_module(module), kind.api.rpartition(".")[2])
        except (ImportError, AttributeError, OSError) as exc:
            reasons.append(f"{kind.api}: {exc}")
            continue
        if options and kind is CheckpointingLibrary:
            raise EngineUnavailableError(
                f"--deepspeed_config: datastates_ckpt.{next(iter(options))} is of the branch of DataStates that has "
                f"{CheckpointEngineLibrary.api}, and {kind.api} is installed; drop it or install that branch"
            )
        return kind, library_class
    raise EngineUnavailableError(
        f"--checkpoint-engine datastates: package datastates cannot be used ({'; '.join(reasons)}); {_INSTALL}"
    )


def open_library(host_cache_bytes: int, rank: int, options: Mapping[str, Any] | None = None) -> Library:
    """Start the library with its own pinned host cache, and with `options` of its own.

    Raises EngineUnavailableError if it does not start.
    """
    kind, library_class = find_library(options)
    try:
        with errors_of_library("starting"):
            return kind(library_class({"host_cache_size": host_cache_bytes / GIB, **(options or {})}, rank))
    except OSError as exc:
        raise EngineUnavailableError(
            f"--checkpoint-engine datastates: {exc}; is --host-cache-size {host_cache_bytes / GIB:g} (GiB) more than "
            "can be pinned?"
        ) from exc


@contextlib.contextmanager
def errors_of_library(doing: str) -> Iterator[None]:
    """The library ends the process, or its thread, with sys.exit(-1) after logging why: raise OSError instead."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except (Exception, SystemExit) as exc:
        raise OSError(f"DataStates failed while {doing} ({_said(exc)}); what it logged says why") from exc


def _said(exc: BaseException) -> str:
    return f"sys.exit({exc.code})" if isinstance(exc, SystemExit) else f"{type(exc).__name__}: {exc}"


class _OneThread(ThreadPoolExecutor):
    """The library's executor, which keeps the futures that the library drops."""

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="datastates", initializer=device_selector())
        self._futures: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self._futures.append(future)
        return future

    def finish(self) -> None:
        """Wait for all that was submitted. Raises OSError if any of it failed."""
        futures, self._futures = self._futures, []
        failed = [exc for exc in [future.exception() for future in futures] if exc is not None]
        if failed:
            raise OSError(
                f"DataStates lost {len(failed)} of {len(futures)} files in its thread ({_said(failed[0])}); what it "
                "logged says why"
            ) from failed[0]


def _open_in_place(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """builtins.open, but "wb" does not truncate."""
    if mode != "wb":
        return open(file, mode, *args, **kwargs)
    return os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", *args, **kwargs)
