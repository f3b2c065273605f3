"""Program of test_peers.py: flips bits of what a process holds, and asks it for that as a rank would.

Arguments: pid of the process, its address, a step, and either a number of flips, each of which is mended again; or
`stay` and a tp coordinate: one flip, which stays. They are in saves of the first pipeline stage, which are slots of the
first node's own ranks, and copies on the other one. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
from pathlib import Path

from megatron.peers.client import Peer, fetch
from megatron.peers.memory_slots import Slot, slots_held_by
from megatron.peers.wire import PeerError, key_of

DEADLINE_S = 300.0


def sealed(pid: int, step: int) -> list[Slot]:
    """Slots of the process that hold the save of a step, of the first pipeline stage."""
    slots = [(slot, slot.record()) for mine in slots_held_by(pid) for slot in mine]
    return [slot for slot, record in slots if record and record["step"] == step and not record["place"]["pp"]]


def port_of(pid: int) -> int:
    """Where it listens: proc(5), net/tcp6."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed since
            sockets.add(os.readlink(path))
    for family in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                return int(fields[1].rpartition(":")[2], 16)
    raise AssertionError(f"process {pid} listens nowhere")


def flip(slot: Slot, position: int, bit: int) -> None:
    (byte,) = os.pread(slot.data, 1, position)
    os.pwrite(slot.data, bytes([byte ^ 1 << bit]), position)


def is_taken(peer: Peer, slot: Slot) -> bool:
    """Whether a fetch of what the slot holds succeeds, or is refused as damaged."""
    record = slot.record()
    assert record is not None
    try:
        fetch(peer, record["save"], key_of(record), lambda size: memoryview(bytearray(size)), DEADLINE_S)
    except PeerError as error:
        assert re.search("has a damaged copy: bytes", str(error)), error
        return False
    return True


def main() -> None:
    pid, address, step, *what = sys.argv[1:]
    peer = Peer("holder", address, port_of(int(pid)))
    slots = {record["place"]["tp"]: slot for slot in sealed(int(pid), int(step)) if (record := slot.record())}
    if what[0] == "stay":
        slot = slots[int(what[1])]
        flip(slot, (slot.record() or {})["file"]["num_bytes"] - 100, 3)
        assert not is_taken(peer, slot)
        print(json.dumps({"flipped": 1}))
        return
    accepted, generator = 0, random.Random(98)
    for number in range(int(what[0])):
        slot = slots[number % len(slots)]
        size = (slot.record() or {})["file"]["num_bytes"]
        position, bit = generator.randrange(size), generator.randrange(8)
        flip(slot, position, bit)
        accepted += is_taken(peer, slot)
        flip(slot, position, bit)
    assert all(is_taken(peer, slot) for slot in slots.values()), "what was mended is refused"
    print(json.dumps({"flipped": int(what[0]), "accepted": accepted, "coordinates": len(slots)}))


if __name__ == "__main__":
    main()
