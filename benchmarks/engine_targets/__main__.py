"""The verdicts of several replays as one table: `python -m benchmarks.engine_targets FILE.json...`.

The files are what `--targets --output FILE` wrote. Exit status: 0 printed, 2 a file cannot be used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from restart_trace.command_line import CommandParser
from tools.ckpt_replay.table import head, render_targets

_EPILOG = """\
examples:
  %(prog)s runs/engine_targets/*.json

exit status: 0 printed, 2 a file cannot be used
"""


def main(argv: Sequence[str]) -> int:
    """Print the table of the replays in the files `argv`; returns the exit status."""
    parser = CommandParser(
        "python -m benchmarks.engine_targets",
        description="The verdicts of several replays as one table.",
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --targets --output FILE wrote")
    files: list[Path] = parser.parse_args(argv).files
    try:
        results = [json.loads(path.read_text()) for path in files]
        print("\n\n".join(_section(result) for result in results))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        print(f"engine_targets: not the output of a replay with --targets: {exc}", file=sys.stderr)
        return 2
    return 0


def _section(result: dict[str, Any]) -> str:
    return "\n".join([*head(result), *render_targets(result["targets"])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
