"""Build the sample index of a training before it starts, so that no rank waits for it.

    python -m tools.build_sample_index FLAGS OF pretrain_gpt.py

The index goes where the training looks for it: beside the data, or to --data-cache-path. What is there already is not
built again. WORLD_SIZE must be set as for a rank unless the layout is of one rank; the default of --global-batch-size
depends on it. The index is that of a run's first start: a later start with other --train-iters keeps the order, and
with it the index, of the first one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from restart_trace.command_line import CommandParser

logger = logging.getLogger("build_sample_index")

_EPILOG = """\
examples:
  WORLD_SIZE=64 python -m tools.build_sample_index --data-path 0.3 books 0.7 web --train-iters 500000 ...

exit status: 0 it is there, 2 wrong flags, or it could not be built
"""


def build(flags: Sequence[str]) -> None:
    """Build the index of the three splits. Exits with 2 and one message if flags or data are wrong."""
    from megatron.config.arguments import exit_with, parse_or_exit
    from megatron.data.given_index import dataset_of_files
    from megatron.data.gpt_dataset import build_train_valid_test_datasets

    config = parse_or_exit(flags)

    def run(work: Callable[[], None]) -> None:
        work()

    def raise_it(error: Exception | None) -> None:
        if error is not None:
            raise error

    try:
        splits = build_train_valid_test_datasets(
            config.data,
            train_valid_test_num_samples=config.training.needed_samples,
            seq_length=config.model.seq_length,
            seed=config.training.seed,
            train_dataset=dataset_of_files(config.data.train_index_files),
            run_on_builder=run,
            agree=raise_it,
        )
    except (OSError, ValueError) as error:
        exit_with(error, 0)
    for name, dataset in zip(("train", "valid", "test"), splits, strict=True):
        logger.info("%s: %s", name, "no samples" if dataset is None else f"{len(dataset)} samples are indexed")


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(
        "python -m tools.build_sample_index", description=(__doc__ or "").splitlines()[0], epilog=_EPILOG
    )
    parser.usage = "%(prog)s FLAGS OF pretrain_gpt.py"
    flags = list(sys.argv[1:] if argv is None else argv)
    if not flags:
        parser.error("give the flags of the training, as for pretrain_gpt.py")
    if flags[0] in ("-h", "--help", "--version"):
        parser.parse_args(flags)
    logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s", stream=sys.stderr)
    build(flags)


if __name__ == "__main__":
    main()
