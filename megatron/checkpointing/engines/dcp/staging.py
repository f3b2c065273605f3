"""Copies of a state that training may change: the library's DefaultStager, with torchtitan's settings."""

from __future__ import annotations

import errno
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from restart_trace.device_threads import device_selector
from restart_trace.devices import accelerator_in_use


class Copies:
    """Their memory is kept for the next save.

    On CUDA the copies are pinned, and are made on a stream of the stager's while training goes on until the optimizer
    steps; without CUDA, for which the library has neither, `stage` makes them.
    """

    def __init__(self, *, shared: bool) -> None:
        """`shared`: in memory that another process can have."""
        self._shared = shared
        self._stager: DefaultStager | None = None

    def start(self) -> None:
        """Begin the threads that `stage` needs, if there are none, and wait for what training has queued on CUDA."""
        if self._stager is not None and _is_spent(self._stager):
            self.drop()
        cuda = accelerator_in_use() == "cuda"
        if self._stager is None:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=self._shared,
                    use_async_staging=cuda,
                    use_non_blocking_copy=cuda,
                )
            )
            if self._stager._staging_executor is not None:  # its one thread would work on device 0
                self._stager._staging_executor.submit(device_selector())
        if cuda:  # the stager's stream does not wait for what training has queued on its own
            torch.accelerator.current_stream().synchronize()

    def stage(self, state: Any) -> Future[Any]:
        """Have `state` copied, now or on the stager's thread, after `start`.

        Raises OSError if there is no room for copies: the library has the reason in a text.
        """
        assert self._stager is not None, "start comes first"
        try:
            found: Any = self._stager.stage(state)
        except RuntimeError as exc:
            if "shared memory" not in str(exc):
                raise
            number = next((code for code in (errno.ENOSPC, errno.EMFILE, errno.ENOMEM) if f"({code})" in str(exc)), 0)
            fix = "a larger /dev/shm, or a higher limit of open files (ulimit -n), as the error says, or another engine"
            raise OSError(number or errno.ENOMEM, f"{exc}; each tensor's storage takes both: {fix}") from exc
        if isinstance(found, Future):
            return found
        staged: Future[Any] = Future()
        staged.set_result(found)
        return staged

    def drop(self) -> None:
        """Give back their memory."""
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()


def _is_spent(stager: DefaultStager) -> bool:
    """Whether a save has used it up: torch 2.11 and 2.12 close its parts then, and the next ends in a KeyError."""
    return not getattr(stager._state_dict_stager, "_deepcopy_dispatch", True)
