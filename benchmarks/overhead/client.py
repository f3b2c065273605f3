"""One rank of a client: it runs the program of a user, traced by hooks or not, in a process that does nothing else."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_REPEATS = 20_000


class Within:
    """Processor time within hooks, and how often they are called.

    Each reading of the clock counts for the hooks: what they cost without it is less.
    """

    def __init__(self) -> None:
        from restart_trace.hooks.guard import Hook

        self.seconds, self.calls = 0.0, 0
        enter, leave = Hook.enter, Hook.leave

        def timed_enter(hook: Any, call: Any) -> Any:
            started = time.thread_time()
            manager = enter(hook, call)
            self.calls += 1
            self.seconds += time.thread_time() - started
            return manager

        def timed_leave(hook: Any, manager: Any, error: BaseException | None) -> None:
            started = time.thread_time()
            leave(hook, manager, error)
            self.seconds += time.thread_time() - started

        Hook.enter, Hook.leave = timed_enter, timed_leave  # type: ignore[method-assign]


def call_s() -> float:
    """Processor time of a hooked call whose hook does nothing."""
    from restart_trace.hooks.guard import wrap

    @contextmanager
    def around(call: Any) -> Iterator[None]:
        yield

    def spent(work: Callable[[], Any]) -> float:
        started = time.thread_time()
        for _ in range(_REPEATS):
            work()
        return (time.thread_time() - started) / _REPEATS

    owner = SimpleNamespace(__name__="owner", f=lambda: None)
    plain_s = spent(owner.f)
    wrap(owner, "f", around)
    return spent(owner.f) - plain_s


def run(plan: dict[str, Any]) -> None:
    """Run the program of the plan, and write what that took to its output, with the processor time within hooks."""
    os.environ.update(plan["environment"])
    os.chdir(plan["directory"])
    sys.argv = [plan["script"], *plan["arguments"]]
    within, of_call_s = None, 0.0
    if plan["trace"]:
        import restart_trace.hooks

        of_call_s = call_s()
        within = Within()
    started, cpu = time.perf_counter(), time.process_time()
    if plan["trace"]:
        restart_trace.hooks.install(plan["trace"])
    try:
        runpy.run_path(plan["script"], run_name="__main__")
    finally:
        sample = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
        if within is not None:
            sample |= {"hooks_s": within.seconds + within.calls * of_call_s, "calls": within.calls}
        Path(f"{plan['output']}.{os.environ['RANK']}").write_text(json.dumps(sample))
        atexit._run_exitfuncs()  # as an interpreter does at its end, and a forked process does not
