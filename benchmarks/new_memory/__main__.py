"""Command line: `python -m benchmarks.new_memory`. Exit status: 0 measured, 2 could not run.

Engine lazy reads moments into new memory. A file that is not in the page cache is read by the threads of that engine
(`megatron.fileio.ranged_reader`) into memory in huge pages, as the engine does; into 4 KiB pages that direct I/O
takes; and into 4 KiB pages where it does not, as torch's allocator returns them: through the threads' buffers.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron.fileio.direct_files import ALIGNMENT, aligned_memory
from megatron.fileio.extents import extents, file_plan
from restart_trace.clock import now_ns
from restart_trace.recorder import untraced_operation
from tools.common import page_cache
from tools.common.cli import COULD_NOT_RUN, OK, make_parser, parse_bytes, require_at_least
from tools.common.tables import markdown_table

_EPILOG = """\
examples:
  %(prog)s --dir /scratch --bytes 2GiB

exit status: 0 measured, 2 could not run
"""
_WRITTEN_AT_ONCE = 64 << 20


def _small_pages(size: int) -> memoryview:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(memory)


def _between_pages(size: int) -> memoryview:
    return _small_pages(size + ALIGNMENT)[64 : 64 + size]


VARIANTS: dict[str, Callable[[int], memoryview]] = {
    "directly into huge pages": aligned_memory,
    "directly into 4 KiB pages": _small_pages,
    "through buffers into 4 KiB pages": _between_pages,
}


def sample(path: Path, size: int, memory: Callable[[int], memoryview]) -> float:
    """Seconds from the request for memory until the file is in it. Raises OSError."""
    import torch

    from megatron.fileio.ranged_reader import Label, Targets, open_all, read_ranges

    if page_cache.state_of(page_cache.drop([path])) != page_cache.COLD:
        raise OSError(f"{path}: stays in the page cache; choose a file system on a disk (--dir)")
    parts = extents(file_plan(path, [(0, 0, 0, size)]))
    label = Label(copy=("load", "host_to_device"), threads="lazy-io")
    with ExitStack() as stack:
        files = open_all({path: size}, "on", stack)
        start = now_ns()
        target = torch.frombuffer(memory(size), dtype=torch.uint8)
        read_ranges(parts, files, Targets([target], {}), None, label, untraced_operation())
        return (now_ns() - start) / 1e9


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser("python -m benchmarks.new_memory", "Time cold reads into new memory, by its pages.", _EPILOG)
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 29, metavar="SIZE", help="(default: 512MiB)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="(default: 9)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="where to work")
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "rounds")
    require_at_least(parser, arguments, ALIGNMENT, "bytes")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    size = arguments.bytes // ALIGNMENT * ALIGNMENT
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    try:
        with tempfile.TemporaryDirectory(prefix="new_memory_", dir=arguments.dir) as directory:
            path = Path(directory) / "state"
            with path.open("wb") as file:
                for start in range(0, size, _WRITTEN_AT_ONCE):
                    file.write(os.urandom(min(_WRITTEN_AT_ONCE, size - start)))
            for number in range(arguments.rounds):
                names = list(VARIANTS)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    seconds[name].append(sample(path, size, VARIANTS[name]))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    rows = [
        [name, f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]",
         f"{size / statistics.median(values) / 1e9:.2f}"]
        for name, values in seconds.items()
    ]  # fmt: skip
    title = f"{size / 2**20:.0f} MiB, cold, {arguments.rounds} rounds: s, median [least, most]"
    print("\n".join(markdown_table([title, "s", "GB/s"], rows)))
    return OK


if __name__ == "__main__":
    sys.exit(main())
