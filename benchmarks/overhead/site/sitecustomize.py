"""Notes the processor time that tracing takes in each Python process of a job, for `benchmarks.overhead.jobs`.

It stands before the sitecustomize of the hooks on PYTHONPATH, imports that, and writes what it has noted at the end.
"""

import atexit
import importlib
import json
import os
import sys
import threading
import time

_HERE = os.path.dirname(os.path.abspath(__file__))
_of_thread = threading.local()
# What torch imports before long, and hooks import when it begins to be imported
_OF_TORCH = (
    "dataclasses", "importlib.metadata", "inspect", "ipaddress", "logging", "multiprocessing.util", "pathlib",
    "platform", "socket", "subprocess", "urllib.parse", "uuid",
)  # fmt: skip
_noted = {"start_s": 0.0, "calls_s": 0.0, "calls": 0}


def _timed(function, key="start_s", calls=0):
    """`function`, whose processor time counts for `key`, unless it is called within another such one."""

    def timed(*args, **kwargs):
        _noted["calls"] += calls
        if getattr(_of_thread, "inside", False):
            return function(*args, **kwargs)
        _of_thread.inside, started = True, time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            _noted[key] += time.thread_time() - started
            _of_thread.inside = False

    return timed


def _began(began):
    """Around what hooks do when the program begins to import torch: it imports what is timed from then on."""

    def first():
        for name in _OF_TORCH:
            importlib.import_module(name)
        _timed(began)()
        from multiprocessing.util import Finalize

        from restart_trace.hooks.guard import Hook
        from restart_trace.recorder import Recorder

        if not getattr(_of_thread, "hooks_are_timed", False):
            _of_thread.hooks_are_timed = True
            Hook.enter, Hook.leave = _timed(Hook.enter, "calls_s", 1), _timed(Hook.leave, "calls_s")
            Recorder.process_ended, Recorder.close = _timed(Recorder.process_ended), _timed(Recorder.close)
            Finalize(None, _write, exitpriority=-100)  # of a process of multiprocessing, which ends without atexit

    return first


def _write():
    with open(os.path.join(os.environ["OVERHEAD_DIR"], f"{os.getpid()}.json"), "w") as file:
        json.dump(_noted, file)


def _import_next():
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    ours = sys.modules.pop("sitecustomize")
    import sitecustomize  # noqa: F401

    sys.modules.setdefault("sitecustomize", ours)


def _install():
    from restart_trace.hooks.imports import ImportWatcher

    install = ImportWatcher.__init__

    def timed(self, watched, announced, began, imported):
        watched = {name: [_timed(action) for action in actions] for name, actions in watched.items()}
        install(self, watched, announced, _began(began), _timed(imported))

    ImportWatcher.__init__ = timed
    _import_next()


if "OVERHEAD_DIR" in os.environ:
    atexit.register(_write)  # first, so that it is the last
    started = time.process_time()
    sys.path.insert(0, os.environ["OVERHEAD_ROOT"])
    _install()
    sys.path.remove(os.environ["OVERHEAD_ROOT"])
    _noted["start_s"] += time.process_time() - started
