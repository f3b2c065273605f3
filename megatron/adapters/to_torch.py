"""Command: python -m megatron.adapters.to_torch SAVE_DIR/TAG OUT_DIR/TAG, for programs that call torch.load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from restart_trace.command_line import CommandParser

_EPILOG = """\
examples:
  python -m megatron.adapters.to_torch checkpoints/global_step100 converted/global_step100
  python converted/zero_to_fp32.py converted out -t global_step100
      with a copy of the script that DeepSpeed puts into its checkpoints

exit status: 0 written, 1 not written: the checkpoint is damaged or incomplete, OUT_DIR/TAG exists, or the storage
refuses; 2 wrong arguments
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    parser = CommandParser(
        prog="python -m megatron.adapters.to_torch",
        description="Write the files of a checkpoint of DeepSpeed's, saved with engine lazy, as torch.save would.",
        epilog=_EPILOG,
    )
    parser.add_argument("checkpoint", type=Path, metavar="SAVE_DIR/TAG", help="directory of the checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT_DIR/TAG", help="new directory")
    parsed = parser.parse_args(argv)
    from megatron.adapters.deepspeed_engine import convert_to_torch
    from megatron.checkpointing.engines.errors import CheckpointError

    try:
        names = convert_to_torch(parsed.checkpoint, parsed.out)
    except (CheckpointError, OSError) as exc:
        print(f"to_torch: {exc}", file=sys.stderr)
        return 1
    print(f"{len(names)} files in {parsed.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
