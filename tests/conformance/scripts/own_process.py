"""What a test wants done in a process of its own: `own_process.py ACTION ENGINE DIRECTORY`.

The last line that it prints is the answer, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron.checkpointing.store.manifest import saved_file
from tests.conformance.compare import differences
from tests.conformance.subjects import Saved, Subject, sizes, traced
from tests.dist.storage import drop_root_rights

NAME = "mp_rank_00_model_states.pt"
ROUNDS = 2


def example_state() -> dict[str, Any]:
    return {"weight": torch.arange(5000.0), "half": torch.ones(33, dtype=torch.bfloat16), "step": 3, "list": [1, "a"]}


def load(subject: Subject, directory: Path) -> Any:
    """Read what another process saved there; its files are told in manifest.json."""
    told = json.loads((directory / "manifest.json").read_text())
    files = [saved_file(entry) for entry in told]
    found = subject.load([NAME], Saved(directory, files, traced("save")))
    return differences(found[NAME], example_state())


def refused(subject: Subject, directory: Path) -> Any:
    """Save into a directory that may not be written to, and load a file that may not be read."""
    drop_root_rights()
    forbidden, allowed = directory / "forbidden", directory / "allowed"
    forbidden.mkdir(mode=0o500)
    saved = subject.save({NAME: example_state()}, allowed)
    for file in saved.files:
        (allowed / file.name).chmod(0o000)
    answers = {}
    for what, act in (
        ("save", lambda: subject.save({NAME: example_state()}, forbidden)),
        ("load", lambda: subject.load([NAME], saved)),
    ):
        try:
            act()
        except Exception as exc:  # judged by the test
            answers[what] = {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
    left = sizes(forbidden)
    again = subject.save({NAME: example_state()}, directory / "again")
    return answers | {"left": left, "again": differences(subject.load([NAME], again)[NAME], example_state())}


def leftovers(subject: Subject, directory: Path) -> Any:
    """Threads, processes and open files after an engine was used and closed, several times over."""
    counts = []
    for number in range(ROUNDS):
        for save in range(2):
            saved = subject.save({NAME: example_state()}, directory / f"{number}_{save}")
            subject.load([NAME], saved)
        subject.close()
        deadline = time.monotonic() + 300.0
        # The system may list a thread for a moment after it has ended.
        while (_alive() or (counts and _native_threads() > counts[0][1])) and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append([len(os.listdir("/proc/self/fd")), _native_threads()])
    return {"alive": _alive(), "counts": counts}


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _alive() -> list[str]:
    """Threads and processes."""
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return threads + children


ACTIONS = {"load": load, "refused": refused, "leftovers": leftovers}

if __name__ == "__main__":
    action, engine, where = sys.argv[1:]
    print(json.dumps(ACTIONS[action](Subject(engine), Path(where))))
