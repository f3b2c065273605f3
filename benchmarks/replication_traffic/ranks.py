"""What ranks of either training do: the variant of a save, and a note of what their host sends."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

from benchmarks.replication_traffic.plan import INTERLEAVE
from megatron.checkpointing.engines.base import CheckpointEngine
from restart_trace.clock import now_ns

_SAMPLE_S = 0.01
_INTERFACE = "eth0"


def set_variant(engine: CheckpointEngine, variant: str) -> None:
    """Let the engine send the copies of the next save so."""
    engine.options = dataclasses.replace(engine.options, copy_steps=1 if variant == INTERLEAVE else None)


def note_sent_bytes(file: Path) -> None:
    """Until the process ends: a line (monotonic ns, bytes) each 10 ms of what this host has sent (proc(5), net/dev)."""

    def note() -> None:
        with file.open("w") as output:
            while True:
                for line in Path("/proc/self/net/dev").read_text().splitlines():
                    name, _, rest = line.partition(":")
                    if name.strip() == _INTERFACE:
                        output.write(json.dumps([now_ns(), int(rest.split()[8])]) + "\n")
                        output.flush()
                time.sleep(_SAMPLE_S)

    threading.Thread(target=note, daemon=True).start()
