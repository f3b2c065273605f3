"""Compare the iterations that two launches of a run both did: are losses the same, digit by digit?

    python compare_losses.py cycle_000.log cycle_001.log

Exit code 0 if they are, 1 if one differs, 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from iteration_log import IterationLine, read_log

COMPARED = ("lm loss", "grad norm", "learning rate", "loss scale", "consumed samples")


def differences(before: IterationLine, after: IterationLine) -> list[str]:
    """What differs between two lines of the same iteration, apart from times and rates."""
    found = []
    for name in COMPARED:
        old, new = before.fields.get(name), after.fields.get(name)
        if old != new:
            found.append(f"{name} {old} became {new}")
    return found


def compare(before: dict[int, IterationLine], after: dict[int, IterationLine]) -> tuple[list[str], bool]:
    """(lines of a report, whether all is identical) for the iterations that both logs have.

    Raises ValueError if there is none with a loss.
    """
    repeated = sorted(before.keys() & after.keys())
    if not any("lm loss" in before[i].fields for i in repeated):
        raise ValueError("no iteration with a loss is in both logs, so nothing was compared")
    report = [f"{'iteration':>10}  {'lm loss before':>16}  {'lm loss after':>16}"]
    identical = True
    for i in repeated:
        found = differences(before[i], after[i])
        identical = identical and not found
        losses = (lines[i].fields.get("lm loss", "-") for lines in (before, after))
        verdict = "; ".join(found) if found else "identical"
        report.append("{:>10}  {:>16}  {:>16}  {}".format(i, *losses, verdict))
    return report, identical


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="log of the launch that was killed")
    parser.add_argument("after", type=Path, help="log of the launch that resumed")
    args = parser.parse_args(argv)
    try:
        report, identical = compare(read_log(args.before), read_log(args.after))
    except (OSError, ValueError) as error:
        print(f"compare_losses: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report))
    print(
        "The repeated iterations are identical, digit by digit."
        if identical
        else "THE REPEATED ITERATIONS DIFFER: the resumed run is not the run that was killed."
    )
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
