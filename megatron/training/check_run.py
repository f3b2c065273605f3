"""Does the checks that each rank does before it imports anything heavy, without starting a rank.

    python -m megatron.training.check_run FLAGS OF pretrain_gpt.py

RANK and WORLD_SIZE must be set as for a rank. The launch scripts call it, so that an error is one message instead of
one from every rank and from the launcher. Exit status: 0 no error, 2 an error.
"""

from __future__ import annotations

import logging

from megatron.checkpointing.engines.errors import CheckpointError
from megatron.config.arguments import exit_with, parse_or_exit
from megatron.startup.preflight import check_before_imports


def main() -> None:
    """Return, or exit with 2 after one message."""
    logging.disable(logging.WARNING)  # the ranks will log warnings
    config = parse_or_exit()
    try:
        check_before_imports(config)
    except (CheckpointError, OSError, ValueError) as error:  # ConfigError is a ValueError
        exit_with(error, config.parallel.rank)


if __name__ == "__main__":
    main()
