"""Prints what each flag of upstream's does here, from the tables that the parser is built of.

python -m tests.golden.upstream_flags
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.arguments import actions_of, build_parser
from megatron.config.unsupported_flags import NO_EFFECT, UNSUPPORTED
from restart_trace.command_line import CommandParser

NAMES = Path(__file__).with_suffix(".txt")
_EPILOG = """\
examples:
  %(prog)s | grep -e --use-flash-attn

exit status: 0 printed, 2 wrong arguments
"""


@dataclass
class Answers:
    """Upstream's flags by what becomes of them; flags that are ignored or refused by the answer that they share."""

    effect: list[str] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def counts(self) -> tuple[int, int, int]:
        """How many have an effect, are accepted without one, and are refused."""
        return len(self.effect), sum(map(len, self.ignored.values())), sum(map(len, self.refused.values()))

    def __str__(self) -> str:
        effect, ignored, refused = self.counts()
        lines = [f"{effect} flags have an effect: pretrain_gpt.py --help"]
        lines += ["", f"{ignored} flags are accepted and have no effect:", *_lines(self.ignored)]
        lines += ["", f"{refused} flags are refused:", *_lines(self.refused)]
        return "\n".join(lines)


def answers(upstream: Iterable[str]) -> Answers:
    """What becomes of the flags called `upstream`. Raises KeyError for one that has no answer."""
    known = actions_of(build_parser())
    found = Answers()
    for name in sorted(set(upstream), key=str.lower):
        if name in UNSUPPORTED:
            found.refused.setdefault(UNSUPPORTED[name], []).append(name)
        elif name in NO_EFFECT:
            inert = NO_EFFECT[name]
            only = f"; accepted: {', '.join(inert.accepted)}" if inert.accepted else ""
            found.ignored.setdefault(inert.why + only, []).append(name)
        else:
            known[name]  # raises KeyError
            found.effect.append(name)
    return found


def _lines(flags_by_text: dict[str, list[str]]) -> list[str]:
    return [f"  {' '.join(names)}: {text}" for text, names in flags_by_text.items()]


if __name__ == "__main__":
    CommandParser(
        "python -m tests.golden.upstream_flags", description="Print what each of upstream's flags does.", epilog=_EPILOG
    ).parse_args()
    print(answers(NAMES.read_text().split()))
