"""Explains errors that come from outside a rank: from another one that is stopped, hangs or has ended, or its host.

Gloo raises RuntimeError in each rank that waits, and torch's store its own errors: none says which flag sets the limit,
or which rank was waited for. NCCL raises DistBackendError where a connection breaks; of a wait that passes its limit it
raises no exception: its watchdog thread prints the operation and its ranks, and aborts the process.
"""

from __future__ import annotations

import re
import traceback
from types import FrameType

from megatron.checkpointing.agreement import FailedAloneError
from megatron.config import Config
from megatron.parallel.lost_peers import comes_from_another_rank, has_timed_out, text_of
from megatron.parallel.tree import AgreementLostError
from megatron.startup.watch import Watch

# module:function -> what a rank is doing; the innermost one on the stack counts.
ACTIVITIES = {
    "megatron.startup.initialize:initialize_megatron": "in the rendezvous of all ranks",
    "megatron.training.trainer:_set_up": "in the start-up",
    "megatron.checkpointing.load.newest:load_newest": "in a load",
    "megatron.training.data:build_data_iterators": "while the data index was built",
    "megatron.training.trainer:_train_step": "in a training step",
    "megatron.training.trainer:_evaluate": "in an evaluation",
    "megatron.training.exit_conditions:reason": "in the agreement on whether to stop",
    "megatron.checkpointing.save.writer:save": "in a save",
    "megatron.training.checkpoints:_check_agreement": "on a checkpoint, in the background,",
    "megatron.training.trainer:_shut_down": "at the end of the run",
}
_OF_C10D = "torch.distributed.distributed_c10d"
# A worker that the kernel ends when memory runs out, and devices that fail.
_OF_HOST = re.compile(
    r"DataLoader worker \(pid.*?(killed by signal|exited unexpectedly)"
    r"|CUDA error: (uncorrectable \w+ error|unspecified launch failure|hardware stack error)"
)
_TEXT_LENGTH = 300


def explain(error: BaseException, config: Config, watch: Watch) -> str | None:
    """One line about an error that another rank or this host caused, or that other ranks waited for; None for others.

    The caller prints it and ends the process. It names the rank that this rank waited for, if `watch` can find it.
    """
    text = text_of(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, FailedAloneError):
        return str(error)
    if comes_from_host(error):
        return (
            f"this host or its device failed {_activity(frames)} ({text[:_TEXT_LENGTH]}): see the kernel's log (dmesg: "
            "memory that ran out, Xid of a GPU) before you restart on it"
        )
    if isinstance(error, AgreementLostError):
        if not has_timed_out(error):
            watch.wait_if_called()
            return str(error)
        where = f"the agreement of all ranks {_activity(frames)}"
    elif comes_from_another_rank(error):
        where = f"{_operation(frames)} {_activity(frames)}"
    else:
        return None
    flag = f"--distributed-timeout-minutes {config.parallel.distributed_timeout_minutes:g}"
    if has_timed_out(error):
        missing = watch.verdict(where)
        return f"{where} waited longer than {flag}: {missing}. See to it before you restart, or raise the flag"
    watch.wait_if_called()
    return (
        f"{where} lost the connection to another rank, which has ended: see the message of that rank; a rank that "
        f"waits longer than {flag} ends, and so do the ranks that wait for it ({text[:_TEXT_LENGTH]})"
    )


def comes_from_host(error: BaseException) -> bool:
    """Whether `error` means that a data worker was ended from outside, or that a device failed."""
    return isinstance(error, RuntimeError) and _OF_HOST.search(text_of(error)) is not None


def _operation(frames: list[FrameType]) -> str:
    """The function of torch.distributed that waited and its ranks, as far as the stack shows them."""
    for frame in frames:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") != _OF_C10D or name == "wrapper":
            continue
        return name + _peers(frame)
    return "a collective"


def _peers(frame: FrameType) -> str:
    from torch.distributed import get_process_group_ranks

    values = frame.f_locals
    for name, shown in (("src", "from"), ("dst", "to")):
        if frame.f_code.co_name in ("recv", "send") and isinstance(values.get(name), int):
            return f" {shown} rank {values[name]}"
    try:
        return f" of ranks {_shown(sorted(get_process_group_ranks(values['group'])))}"
    except (KeyError, RuntimeError, ValueError, AttributeError):
        return ""


def _shown(ranks: list[int]) -> str:
    """All ranks if there are few, otherwise the first two and the last."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _activity(frames: list[FrameType]) -> str:
    found = ""
    for frame in frames:
        found = ACTIVITIES.get(f"{frame.f_globals.get('__name__')}:{frame.f_code.co_name}", found)
    return found or "between the ranks"
