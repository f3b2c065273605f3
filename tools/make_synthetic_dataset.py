"""Write a dataset of random tokens, for runs that measure checkpoints and not learning.

    python -m tools.make_synthetic_dataset --output-prefix P --tokens 1000000 --vocab-size 50256

writes P.bin and P.idx in Megatron's mmap format: documents of random tokens below --vocab-size, each ended by
the token --vocab-size itself, as NullTokenizer of that size would. Where a dataset of at least that many
tokens is there, nothing is done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import (
    IndexedDatasetError,
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    best_fitting_dtype,
    data_file_path,
    index_file_path,
)
from restart_trace.command_line import CommandParser

MIN_DOCUMENT_TOKENS = 64
MAX_DOCUMENT_TOKENS = 4096

logger = logging.getLogger("make_synthetic_dataset")


def has_dataset(prefix: str, tokens: int, vocab_size: int) -> bool:
    """True if `prefix` names a readable dataset of at least `tokens` tokens in the fitting data type."""
    if not (Path(index_file_path(prefix)).is_file() and Path(data_file_path(prefix)).is_file()):
        return False
    try:
        dataset = MMapIndexedDataset(prefix)
    except IndexedDatasetError as error:
        logger.info("%s; writing it again", error)
        return False
    return dataset.num_tokens >= tokens and dataset.dtype == best_fitting_dtype(vocab_size + 1)


def write_dataset(prefix: str, tokens: int, vocab_size: int, seed: int) -> None:
    """Write `tokens` tokens, the last of each document being `vocab_size`.

    The same arguments give the same bytes, and files appear under their names only when they are complete, so
    that nodes which share a file system may all do this at once. Raises OSError if they cannot be written.
    """
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{prefix}.{uuid.uuid4().hex[:8]}.tmp"
    paths = (data_file_path(temporary), index_file_path(temporary))
    random = np.random.default_rng(seed)
    builder = MMapIndexedDatasetBuilder(paths[0], best_fitting_dtype(vocab_size + 1))
    try:
        written = 0
        while written < tokens:
            drawn = int(random.integers(MIN_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS, endpoint=True))
            size = min(drawn, tokens - written)
            document = random.integers(0, vocab_size, size=size)
            document[-1] = vocab_size
            builder.add_doc(document, [size])
            written += size
        builder.finalize(paths[1])
        os.replace(paths[0], data_file_path(prefix))
        os.replace(paths[1], index_file_path(prefix))
    finally:
        builder.close()
        for path in paths:
            Path(path).unlink(missing_ok=True)


_EPILOG = """\
examples:
  %(prog)s --output-prefix data/random --tokens 1000000 --vocab-size 50256

exit status: 0 it is there, 2 it could not be written
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        "python -m tools.make_synthetic_dataset", description=(__doc__ or "").splitlines()[0], epilog=_EPILOG
    )
    parser.add_argument("--output-prefix", required=True, help="path of the files without .bin and .idx")
    parser.add_argument("--tokens", type=int, required=True, help="at least this many")
    parser.add_argument("--vocab-size", type=int, required=True, help="ids beside the one that ends documents")
    parser.add_argument("--seed", type=int, default=1234, help="of the random tokens")
    args = parser.parse_args(argv)
    for name in ("tokens", "vocab_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s", stream=sys.stderr)
    if has_dataset(args.output_prefix, args.tokens, args.vocab_size):
        logger.info("dataset %s is there", args.output_prefix)
        return 0
    logger.info("writing %d random tokens to %s", args.tokens, args.output_prefix)
    try:
        write_dataset(args.output_prefix, args.tokens, args.vocab_size, args.seed)
    except OSError as error:
        message = f"make_synthetic_dataset: error: --output-prefix {args.output_prefix}: {error}"
        print(message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
