"""A progress bar on stderr for work that takes over two seconds, and remarks. Without a terminal there is no bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...common.escaping import visible

SHOWN_AFTER_S = 2


class Progress:
    """`quiet` silences everything; the bar needs a terminal besides."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    @contextmanager
    def bar(self, total: int | None, what: str, unit: str) -> Iterator[Callable[[int], object]]:
        """Yields a function that takes how much more is done, in `unit`s of which there are `total`."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda done: None
            return
        from tqdm import tqdm

        look: dict[str, Any] = {"unit_scale": True, "leave": False, "dynamic_ncols": True}
        with tqdm(total=total, desc=what, unit=unit, delay=SHOWN_AFTER_S, file=sys.stderr, **look) as bar:
            yield bar.update

    def remark(self, text: str) -> None:
        """A line that is no part of the answer."""
        if not self.quiet:
            print(f"ckpt-analysis: {visible(text)}", file=sys.stderr)
