"""Prints docs/upstream_flags.md: what each flag of upstream's does here, from the tables that the parser is built of.

python -m tests.golden.upstream_flags_page tests/golden/upstream_flags.txt > docs/upstream_flags.md
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron.config.arguments import actions_of, build_parser
from megatron.config.unsupported_flags import NO_EFFECT, UNSUPPORTED
from restart_trace.command_line import CommandParser

_HEAD = """\
# What upstream's flags do here

Every flag of upstream Megatron-DeepSpeed (commit 4efb479d) has an effect here, is accepted without one, or is
refused. The page is printed by `python -m tests.golden.upstream_flags_page tests/golden/upstream_flags.txt`.

Of upstream's 55 shell scripts that run `pretrain_gpt.py` with arguments of their own, 37 are accepted with their
flags unchanged; each key of their DeepSpeed files is checked separately. The other 18 use a feature that is refused:
a mixture of experts (5), distillation (5, of which 2 with experts), sequence parallelism of more than one rank (3),
ZeRO-3 (2), an optimizer on the CPU (2), the zero-bubble pipeline (1).

Length and schedules work as in upstream:

- Either `--train-iters` or `--train-samples` sets the length of a run. `--train-tokens` may end it earlier.
- `--lr-decay-samples`, `--lr-warmup-samples` and `--rampup-batch-size` need `--train-samples`. `--lr-decay-iters`
  and `--lr-warmup-iters` need `--train-iters`. `--lr-decay-tokens` and `--lr-warmup-tokens` go with either. Unlike
  upstream, `--lr-warmup-tokens` needs `--lr-decay-tokens`.
- A resumed run takes its batch size from the number of consumed samples, and its schedule from the checkpoint.
"""

_EPILOG = """\
examples:
  %(prog)s tests/golden/upstream_flags.txt >docs/upstream_flags.md

exit status: 0 printed, 2 wrong arguments
"""


def page(upstream: Iterable[str]) -> str:
    """The page about the flags called `upstream`. Raises KeyError for one that has no answer."""
    known = actions_of(build_parser())
    effect: list[str] = []
    none: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name in sorted(set(upstream), key=str.lower):
        if name in UNSUPPORTED:
            refused.setdefault(UNSUPPORTED[name], []).append(name)
        elif name in NO_EFFECT:
            inert = NO_EFFECT[name]
            only = f"; accepted: {', '.join(inert.accepted)}" if inert.accepted else ""
            none.setdefault(inert.why + only, []).append(name)
        else:
            known[name]  # raises KeyError
            effect.append(name)
    return "\n".join(
        [
            _HEAD,
            f"## {len(effect)} flags have an effect\n",
            "`python pretrain_gpt.py --help` says what each does, with its default.\n",
            f"{_names(effect)}\n",
            f"## {sum(map(len, none.values()))} flags are accepted and have no effect; the log says so\n",
            _table("why", none),
            f"## {sum(map(len, refused.values()))} flags are refused by name\n",
            _table("what to use instead", refused),
        ]
    )


def _table(column: str, flags_by_text: dict[str, list[str]]) -> str:
    """Flags with the same answer share a row."""
    rows = [f"| {_names(names)} | {_cell(text)} |" for text, names in flags_by_text.items()]
    return "\n".join([f"| flags | {column} |", "|---|---|", *rows, ""])


def _names(flags: Iterable[str]) -> str:
    return " ".join(f"`{flag}`" for flag in flags)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    parser = CommandParser(
        "python -m tests.golden.upstream_flags_page", description="Print docs/upstream_flags.md.", epilog=_EPILOG
    )
    parser.add_argument("names", type=Path, metavar="FILE", help="the names of upstream's flags")
    print(page(parser.parse_args().names.read_text().split()), end="")
