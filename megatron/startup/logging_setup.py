"""Where the log of a rank goes, and what libraries print."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_FORMAT = "[%(asctime)s] [rank {rank}] %(levelname)s: %(message)s"


def set_up_logging(level: str, rank: int) -> None:
    """Log to stdout; other ranks than 0 only from WARNING on."""
    # DeepSpeed's ZeRO calls it in every step; the user can do nothing about that.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.basicConfig(stream=sys.stdout, format=_FORMAT.format(rank=rank), datefmt="%H:%M:%S", force=True)
    chosen = getattr(logging, level.upper())
    logging.getLogger().setLevel(max(chosen, logging.WARNING))
    logging.getLogger("megatron").setLevel(chosen if rank == 0 else max(chosen, logging.WARNING))


@contextlib.contextmanager
def printed_as_debug() -> Iterator[None]:
    """Within it, what libraries print goes to the log at level debug: DeepSpeed prints its set-up."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            logger.debug("%s", line)
