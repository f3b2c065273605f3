"""Ways of writing and reading: each moves every byte, and the command tells of all that it was asked for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.storage_limit.__main__ import main, parse_arguments, table
from benchmarks.storage_limit.moving import Buffers, Move, new_state
from benchmarks.storage_limit.ring import NoRingError, Ring
from benchmarks.storage_limit.ways import READS, WRITES, Way

MIB = 1 << 20


def is_refused(use_a_ring: Callable[[], object]) -> bool:
    """Whether this kernel has no io_uring, or does not allow it: what needs it then says so, and what to leave out."""
    try:
        Ring(4).close()
    except NoRingError:
        with pytest.raises(NoRingError, match="io_uring: .*; leave out the ways whose names begin with uring"):
            use_a_ring()
        return True
    return False


@pytest.mark.parametrize("name", WRITES)
def test_every_byte_is_written(name: str, tmp_path: Path) -> None:
    way = WRITES[name]
    state = new_state(3 * MIB)
    state[:] = np.random.default_rng(0).integers(0, 256, len(state), dtype=np.uint8)
    move = Move(way, state, tmp_path, Buffers(), write=True)
    if way.uring and is_refused(move.run):
        return
    assert move.run() > 0
    assert b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir())) == state.tobytes()
    move.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", READS)
def test_every_byte_is_read(name: str, tmp_path: Path) -> None:
    way = READS[name]
    state = new_state(3 * MIB)
    Move(Way(files=way.files), state, tmp_path, Buffers(), write=True).run()
    saved = state.copy()
    state[:] = 0
    move = Move(way, state, tmp_path, Buffers(), write=False)
    move.drop()
    if way.uring and is_refused(move.run):
        return
    move.run()
    assert np.array_equal(state, saved)


def test_an_error_of_a_queued_transfer_is_raised(tmp_path: Path) -> None:
    if is_refused(lambda: Ring(1)):
        return
    state = new_state(MIB)
    Move(Way(), state, tmp_path, Buffers(), write=True).run()
    ring = Ring(1)
    with (tmp_path / "part_1_000").open("rb") as file:
        ring.queue(write=True, fd=file.fileno(), buffer=state.data, position=0, tag=1)
        with pytest.raises(OSError, match="Bad file descriptor"):
            ring.wait()
    ring.close()


def test_a_ring_is_closed_when_nothing_is_under_way_any_more() -> None:
    """After an error, too: the kernel would fill a buffer that is used for something else by then."""
    if is_refused(lambda: Ring(1)):
        return
    ends = os.pipe()
    buffers = [new_state(MIB).data for _ in range(2)]
    ring = Ring(2)
    ring.queue(write=False, fd=ends[0], buffer=buffers[0], position=0, tag=0)  # ends when something is written there
    ring.queue(write=True, fd=ends[0], buffer=buffers[1], position=0, tag=1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        ring.wait()
    closing = threading.Thread(target=ring.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    os.write(ends[1], b"data")
    closing.join()
    assert bytes(buffers[0][:4]) == b"data"
    for fd in ends:
        os.close(fd)


@pytest.mark.parametrize("kind", ["write", "read"])
def test_the_command_measures_what_it_is_asked_for(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--bytes", "64MiB", "--repeat", "2", "--only", "in-place", "--dir", str(tmp_path), "--format", "json"]
    assert main([kind, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["seconds"]) == ["filled" if kind == "write" else "placed", "in-place"]
    assert all(len(values) == 2 for values in found["seconds"].values())
    assert not list(tmp_path.iterdir())


def test_a_ratio_compares_speeds() -> None:
    lines = table("write", 64 * MIB, {"filled": [1.0, 1.1, 0.9], "threads": [2.0, 2.2, 1.8]})
    assert "1.00 [" in lines[1] and "0.50 [" in lines[2]


@pytest.mark.parametrize("size", ["0", "100MiB"])
def test_a_size_that_cannot_be_divided_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["write", "--bytes", size])
    assert "--bytes" in capsys.readouterr().err
