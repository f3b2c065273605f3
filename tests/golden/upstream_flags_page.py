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
refused; the three tables say which. `python pretrain_gpt.py --help` also lists the flags that upstream does not
have. The page is printed from the tables of the parser by `python -m tests.golden.upstream_flags_page
tests/golden/upstream_flags.txt`.

Upstream has 55 shell scripts that run `pretrain_gpt.py` with arguments of their own. 37 of them are accepted with
their flags unchanged; each key of their DeepSpeed files (a curriculum, for example) is checked separately. The
other 18 use a feature that is refused: a mixture of experts (5), distillation (5, of which 2 with experts),
sequence parallelism of more than one rank (3), ZeRO-3 (2), an optimizer on the CPU (2), the zero-bubble pipeline
(1). `tests/golden/record_upstream_scripts.py` counts the scripts and records their arguments.

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
    help_of = {name: action.help or "" for name, action in actions_of(build_parser()).items()}
    names = sorted(set(upstream), key=str.lower)
    effect, none, refused = [], [], []
    for name in names:
        if name in UNSUPPORTED:
            refused.append(f"| `{name}` | {_cell(UNSUPPORTED[name])} |")
        elif name in NO_EFFECT:
            inert = NO_EFFECT[name]
            only = f"; accepted: {', '.join(inert.accepted)}" if inert.accepted else ""
            none.append(f"| `{name}` | {_cell(inert.why + only)} |")
        else:
            effect.append(f"| `{name}` | {_cell(help_of[name].replace('%%', '%'))} |")
    sections = (
        (f"## {len(effect)} flags have an effect", "what it does", effect),
        (f"## {len(none)} flags are accepted and have no effect; the log says so", "why", none),
        (f"## {len(refused)} flags are refused by name", "what to use instead", refused),
    )
    parts = [_HEAD]
    for title, column, rows in sections:
        parts.append("\n".join([title, "", f"| flag | {column} |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    parser = CommandParser(
        "python -m tests.golden.upstream_flags_page", description="Print docs/upstream_flags.md.", epilog=_EPILOG
    )
    parser.add_argument("names", type=Path, metavar="FILE", help="the names of upstream's flags")
    print(page(parser.parse_args().names.read_text().split()), end="")
