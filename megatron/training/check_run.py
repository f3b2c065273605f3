"""Does the checks that each rank does before it imports anything heavy, without starting a rank.

    python -m megatron.training.check_run [--read-only [--without-data]] FLAGS OF pretrain_gpt.py

RANK and WORLD_SIZE must be set as for a rank. The launch scripts call it, so that an error is one message instead of
one from every rank and from the launcher. With --read-only it writes nothing and asks no object storage: for a dry run,
and before a job is submitted. --without-data: the launch has yet to write the dataset. Exit status: 0 no error, 2 an
error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from megatron.checkpointing.engines.errors import CheckpointError
from megatron.config.arguments import exit_with, parse_or_exit
from megatron.startup.preflight import check_before_imports, check_without_writing


def main(argv: Sequence[str] | None = None) -> None:
    """Return, or exit with 2 after one message."""
    logging.disable(logging.WARNING)  # the ranks will log warnings
    flags = list(sys.argv[1:] if argv is None else argv)
    read_only = flags[:1] == ["--read-only"]
    with_data = flags[:2] != ["--read-only", "--without-data"]
    config = parse_or_exit(flags[read_only + (not with_data) :])
    try:
        if read_only:
            check_without_writing(config, with_data=with_data)
        else:
            check_before_imports(config)
    except (CheckpointError, OSError, ValueError) as error:  # ConfigError is a ValueError
        exit_with(error, config.parallel.rank)


if __name__ == "__main__":
    main()
