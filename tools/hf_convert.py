"""Convert checkpoints of this trainer into Hugging Face model directories, and the other way round.

    python tools/hf_convert.py export --load runs/7b --out 7b_hf
    python tools/hf_convert.py import --load Llama-3-8B --out runs/from_hf

docs/hf.md says which models there are in both. Exit code: 0 done, 2 could not be done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the packages are beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "tools"

from .common.cli import COULD_NOT_RUN, OK, make_parser, parse_bytes, write_stdout  # noqa: E402

PROGRAM = "hf-convert"
_EXPORT_EPILOG = """\
examples:
  hf-convert export --load runs/7b --out 7b_hf --max-shard-size 4GB
  hf-convert export --load runs/7b --load-tag global_step500 --out 7b_hf

exit status: 0 written, 2 could not be written; --out is not there then
"""
_IMPORT_EPILOG = """\
examples:
  hf-convert import --load Llama-3-8B --out runs/from_hf
      prints the flags with which pretrain_gpt.py begins from it, on any TP x PP x DP

exit status: 0 written, 2 could not be written; --out is not there then
"""
_EPILOG = """\
examples:
  hf-convert export --load runs/7b --out 7b_hf
  hf-convert import --load Llama-3-8B --out runs/from_hf

exit status: 0 written, 2 could not be written; --out is not there then
"""


def _directory(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text}: conversions read and write directories; give one, and copy")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    description = "Convert checkpoints of this trainer into Hugging Face model directories, and the other way round."
    parser = make_parser(PROGRAM, description, _EPILOG)
    commands = parser.add_subparsers(dest="direction", required=True, metavar="{export,import}")
    out = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model directory",
        description="Write a checkpoint as a Hugging Face model directory: LLaMA, GPT-2 or BLOOM.",
        epilog=_EXPORT_EPILOG,
    )
    out.add_argument("--load", required=True, type=_directory, metavar="DIR", help="what a training had as --save")
    out.add_argument("--load-tag", metavar="TAG", help="the checkpoint to export, in place of the newest")
    out.add_argument("--out", required=True, type=_directory, metavar="DIR", help="the new model directory")
    out.add_argument(
        "--max-shard-size", type=parse_bytes, default="5GB", metavar="SIZE",
        help="size of a file of tensors; one tensor may be larger",
    )  # fmt: skip
    into = commands.add_parser(
        "import",
        help="write a Hugging Face model as a checkpoint to begin from",
        description="Write a LLaMA, Mistral, GPT-2 or BLOOM model as a checkpoint, from which a training begins.",
        epilog=_IMPORT_EPILOG,
    )
    into.add_argument(
        "--load", required=True, type=_directory, metavar="DIR", help="a Hugging Face model directory with safetensors"
    )
    into.add_argument("--out", required=True, type=_directory, metavar="DIR", help="the new directory, for --load")
    into.add_argument(
        "--params-dtype", choices=["bf16", "fp16", "fp32"],
        help="type of the weights, to which others are rounded (default: that of the tensors)",
    )  # fmt: skip
    into.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help="as the training's flag of that name"
    )
    return parser


def _convert(arguments: argparse.Namespace) -> str:
    if arguments.direction == "export":
        from megatron.hf.exporting import export

        return export(arguments.load, arguments.out, arguments.load_tag, arguments.max_shard_size)
    from megatron.hf.importing import import_model

    return import_model(arguments.load, arguments.out, arguments.params_dtype, arguments.make_vocab_size_divisible_by)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.direction == "export" and arguments.max_shard_size < 1:
        parser.error(f"--max-shard-size {arguments.max_shard_size}: must be at least 1")
    if arguments.direction == "import" and arguments.make_vocab_size_divisible_by < 1:
        parser.error(f"--make-vocab-size-divisible-by {arguments.make_vocab_size_divisible_by}: must be at least 1")
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would say on stdout that it has chosen
    logging.basicConfig(level=logging.WARNING, format=f"{PROGRAM}: %(message)s", stream=sys.stderr)
    from megatron.checkpointing.engines.errors import CheckpointError, EngineUnavailableError, UnknownEngineError
    from megatron.hf.errors import ConversionError

    try:
        write_stdout(_convert(arguments) + "\n")
    except (ConversionError, CheckpointError, UnknownEngineError, EngineUnavailableError) as exc:
        print(f"{PROGRAM}: error: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    except OSError as exc:
        fix = f"give a --load that can be read, and an --out on storage with enough space; {arguments.out} is not there"
        print(f"{PROGRAM}: error: {exc}: {fix}", file=sys.stderr)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; nothing was written", file=sys.stderr)
        return 130
    return OK


if __name__ == "__main__":
    sys.exit(main())
