"""Lines of a process whose output others share: each is one write, so that no line of another process comes within it.

With unbuffered output (PYTHONUNBUFFERED, which the launch scripts set) print() writes the end of a line apart.
"""

from __future__ import annotations

import sys
from typing import TextIO


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print `line`, or several that belong together, to `stream` (stderr if None) at once."""
    to = sys.stderr if stream is None else stream
    to.write(f"{line}\n")
    to.flush()
