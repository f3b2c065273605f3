"""The capability table of docs/engines.md, from what each engine is seen to do.

python -m tests.conformance.capabilities                            print it
python -m tests.conformance.capabilities --write docs/engines.md    replace it between its markers
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.conformance.compare import differences
from tests.conformance.damage import OTHER, REFUSED, damaged, flipped, outcome, pickles, positions
from tests.conformance.states import DTYPES, RARE_DTYPES, RARE_STATES, STATES, tensor
from tests.conformance.subjects import Saved, Subject, all_engines, file_states, traced, wait_in_thread
from tests.engines import EXCEPTIONS, EXPECTED
from tools.common.marked import between_markers, replaced

NAME = "capabilities"  # of the markers
NAMES = [f"layer_{i:02d}-model_00-model_states.pt" for i in range(3)]
LARGE_BYTES = 16 << 20
FLIPS = 24
REFUSED_BY_ALL = ("range", "class of its own", "function", "sparse tensor", "meta tensor")


def example_states() -> dict[str, Any]:
    """Three files of four tensors each."""
    return {
        name: {"step": 5, **{f"{i}.weight": tensor(torch.float32, 60 + i, seed=i) for i in range(4)}} for name in NAMES
    }


@dataclass
class Seen:
    """An engine at work: a save with the usual options, one with fsync and without checksum, and room for more."""

    subject: Subject
    directory: Path
    saved: Saved
    synchronised: Saved
    processes: int  # that the engine started
    _next: int = 0

    @cached_property
    def refused_values(self) -> list[str]:
        states = {name: build() for name, build in RARE_STATES.items() if not name.startswith("torch.")}
        return list(_not_kept(self, states))

    def room(self) -> Path:
        self._next += 1
        made = self.directory / f"more_{self._next}"
        made.mkdir()
        return made


def yes(it_does: bool) -> str:
    return "yes" if it_does else "no"


def asynchronous(seen: Seen) -> str:
    writes = [span for span in seen.saved.traced.records.spans("flush", "write") if span.get("bytes")]
    return yes(bool(writes) and not any(span["blocking"] for span in writes))


def snapshot_memory(seen: Seen) -> str:
    """What training waits to be copied by a save that no optimizer step interrupts, against the size of the state."""
    trace, state = traced("save"), {"weight": torch.ones(LARGE_BYTES // 4)}
    pending = seen.subject.engine().begin_save(file_states({NAMES[0]: state}), seen.room(), trace.op)
    thread, _ = wait_in_thread(pending)
    thread.join()
    pending.release_state()
    copies = [span for span in trace.records.spans("device_to_host") if span["blocking"]]
    if sum(span.get("bytes", 0) for span in copies) >= LARGE_BYTES:
        return "all of the state"
    return "what is unwritten when the optimizer steps" if asynchronous(seen) == "yes" else "none"


def fsync(seen: Seen) -> str:
    spans = seen.synchronised.traced.records.spans("flush", "fsync")
    return yes(bool(spans) and seen.synchronised.traced.op.durable is True)


def checksum(seen: Seen) -> str:
    """Its name in the manifest, and whether damage is found without it."""
    names = ", ".join(sorted({f"`{file.checksum.partition(':')[0]}`" for file in seen.saved.files}))
    return names + (", optional" if OTHER in _flips(seen, seen.synchronised) else ", always")


def _flips(seen: Seen, saved: Saved) -> Iterator[str]:
    """What comes of flipped bits all over the files, one after another."""
    for number, file in enumerate(saved.files):
        path = saved.directory / file.name
        content = path.read_bytes()
        for position, bit in positions(len(content), FLIPS, seed=number):
            with damaged(path, flipped(content, position, bit)):
                found = _outcome(seen, saved)
            yield found


def _outcome(seen: Seen, saved: Saved) -> str:
    try:
        return outcome(seen.subject, example_states(), saved)
    except Exception:  # no named one, which is for the contract's test to tell; but not another state
        return REFUSED


def finds_flipped_bit(seen: Seen) -> str:
    found = set(_flips(seen, seen.saved))
    return yes(REFUSED in found and OTHER not in found)


def without_manifest(seen: Seen) -> str:
    """Whether files alone, without the manifest, can be read, and whether damage is found then."""
    try:
        found = seen.subject.load(NAMES, seen.saved, manifest={})
    except Exception:  # it cannot, whatever it says
        return "no"
    return yes(differences(found, example_states()) == [])


def refused_dtypes(seen: Seen) -> str:
    dtypes = {str(dtype).removeprefix("torch."): {"a": tensor(dtype, 5)} for dtype in (*DTYPES, *RARE_DTYPES)}
    return ", ".join(f"`{name}`" for name in _not_kept(seen, dtypes)) or "none"


def refused_by_all(seen: Seen) -> str:
    return ", ".join(name for name in seen.refused_values if name in REFUSED_BY_ALL)


def refused_besides(seen: Seen) -> str:
    return ", ".join(name for name in seen.refused_values if name not in REFUSED_BY_ALL) or "none"


def _not_kept(seen: Seen, states: dict[str, Any]) -> Iterable[str]:
    for name, state in states.items():
        try:
            saved = seen.subject.save({NAMES[0]: state}, seen.room())
            found = seen.subject.load(NAMES[:1], saved)
        except Exception:  # refused, whatever it says
            yield name
            continue
        if differences(found[NAMES[0]], state):
            yield name


def pickled(seen: Seen) -> str:
    kinds = ("containers", "plain values", "random states", "classes of DeepSpeed's state")
    saved = seen.subject.save({f"{i}.pt": STATES[kind]() for i, kind in enumerate(kinds)}, seen.room())
    holding = [file.name for file in saved.files if pickles((saved.directory / file.name).read_bytes())]
    return "known classes only" if holding else "none"


def processes(seen: Seen) -> str:
    return str(seen.processes)


# Heading -> how a cell is observed.
COLUMNS: dict[str, Callable[[Seen], str]] = {
    "writes in the background": asynchronous,
    "snapshot of a CPU state": snapshot_memory,
    "fsync": fsync,
    "checksum": checksum,
    "finds a flipped bit": finds_flipped_bit,
    "readable without a manifest": without_manifest,
    "refused dtypes": refused_dtypes,
    "refused by all": refused_by_all,
    "other refused values": refused_besides,
    "unpickles": pickled,
    "processes of its own": processes,
}
# What is observed of every engine alike: the text before the table says it.
ALIKE = {"fsync": "yes", "finds a flipped bit": "yes", "refused dtypes": "none"}
ALIKE |= {"refused by all": ", ".join(REFUSED_BY_ALL)}
SHOWN = [heading for heading in COLUMNS if heading not in ALIKE]


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def observe(name: str, directory: Path) -> dict[str, str]:
    """Heading -> cell for one engine that can save here."""
    before = _children()
    subject = Subject(name)
    try:
        saved = subject.save(example_states(), directory / "saved")
        started = len(_children() - before)  # those of others may end meanwhile
        synchronised = subject.save(example_states(), directory / "synchronised", fsync=True, checksum=False)
        seen = Seen(subject, directory, saved, synchronised, started)
        return {heading: observed(seen) for heading, observed in COLUMNS.items()}
    finally:
        subject.close()


def exception_row(name: str) -> dict[str, str]:
    """The row of an engine that cannot be observed here: why, and nothing else."""
    cells = dict.fromkeys(COLUMNS, "–")
    cells["writes in the background"] = EXCEPTIONS[name]
    return cells


def row(name: str, cells: dict[str, str]) -> str:
    return f"| `{name}` | " + " | ".join(cells[heading] for heading in SHOWN) + " |"


def header() -> str:
    return "| engine | " + " | ".join(SHOWN) + " |\n" + "|---" * (len(SHOWN) + 1) + "|"


def table() -> str:
    """Observe every engine. Takes some seconds each."""
    rows = []
    for name in all_engines():
        if name in EXCEPTIONS:
            rows.append(row(name, exception_row(name)))
        elif name in EXPECTED:
            with tempfile.TemporaryDirectory() as directory:
                rows.append(row(name, observe(name, Path(directory))))
    return "\n".join([header(), *rows])


def table_in(document: str) -> str:
    """The text between the markers. Raises ValueError if they are not both there, each on its line."""
    return between_markers(document, NAME)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="the capability table of the checkpoint engines")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this document")
    asked = parser.parse_args(argv)
    if asked.write is None:
        print(table())
    else:
        asked.write.write_text(replaced(asked.write.read_text(), NAME, table()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
