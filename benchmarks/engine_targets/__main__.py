"""The verdicts of several replays as one table: `python -m benchmarks.engine_targets FILE.json...`.

The files are what `--targets --output FILE` wrote. Exit status: 0 printed, 2 a file cannot be used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.ckpt_replay.table import head, render_targets


def main(argv: Sequence[str]) -> int:
    """Print the table of the replays in the files `argv`."""
    try:
        results = [json.loads(Path(name).read_text()) for name in argv]
        print("\n\n".join(_section(result) for result in results))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        print(f"targets_table: not the output of a replay with --targets: {exc}", file=sys.stderr)
        return 2
    return 0


def _section(result: dict[str, Any]) -> str:
    return "\n".join([*head(result), *render_targets(result["targets"])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
