"""Prints docs/upstream_flags.md: what each flag of upstream's does here, from the tables that the parser is built of.

python -m tools.upstream_flags_page tests/golden/upstream_flags.txt > docs/upstream_flags.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from megatron.config.arguments import build_parser
from megatron.config.unsupported_flags import NO_EFFECT, NO_EFFECT_VALUES, UNSUPPORTED

_HEAD = """\
# What upstream's flags do here

This page answers for every flag of upstream Megatron-DeepSpeed (commit 4efb479d). It is printed by
`python -m tools.upstream_flags_page tests/golden/upstream_flags.txt`, from the tables that the parser is built of.
`python pretrain_gpt.py --help` has this project's own flags, too.

Of upstream's 55 shell scripts that run `pretrain_gpt.py` with arguments of their own, 37 are accepted with their
flags as they are; what their DeepSpeed files ask for, a curriculum for example, is judged key by key. The other 18
ask for what is refused below: a mixture of experts (5), distillation (5, of which 2 with experts), sequence
parallelism of more than one rank (3), ZeRO-3 (2), an optimizer on the CPU (2), the zero-bubble pipeline (1).
`tests/golden/record_upstream_scripts.py` says how they were counted and their arguments recorded.

Length and schedules, as upstream has them:

- `--train-iters` or `--train-samples` gives the length of a run, not both. `--train-tokens` may end either earlier.
- `--lr-decay-samples`, `--lr-warmup-samples` and `--rampup-batch-size` go with `--train-samples`;
  `--lr-decay-iters` and `--lr-warmup-iters` with `--train-iters`; `--lr-decay-tokens` and `--lr-warmup-tokens` with
  either. One difference: `--lr-warmup-tokens` needs `--lr-decay-tokens`.
- A resumed run knows its batch size by the samples it has consumed, and its schedule by the checkpoint.
"""


def page(upstream: Iterable[str]) -> str:
    """The page about the flags called `upstream`. Raises KeyError for one that has no answer."""
    help_of = {
        name: action.help or "" for action in build_parser()._actions for name in action.option_strings
    }
    names = sorted(set(upstream), key=str.lower)
    effect, none, refused = [], [], []
    for name in names:
        if name in UNSUPPORTED:
            refused.append(f"| `{name}` | {_cell(UNSUPPORTED[name])} |")
        elif name in NO_EFFECT:
            none.append(f"| `{name}` | {_cell(NO_EFFECT[name])} |")
        elif name in NO_EFFECT_VALUES:
            inert = NO_EFFECT_VALUES[name]
            only = f"; only {', '.join(inert.accepted)} is accepted" if inert.accepted else ""
            none.append(f"| `{name}` | {_cell(inert.why + only)} |")
        else:
            effect.append(f"| `{name}` | {_cell(help_of[name].replace('%%', '%'))} |")
    sections = (
        (f"## {len(effect)} have their effect", "what it does", effect),
        (f"## {len(none)} are accepted and change nothing, as one line of the log says", "why", none),
        (f"## {len(refused)} are refused by name", "what to use instead", refused),
    )
    parts = [_HEAD]
    for title, column, rows in sections:
        parts.append("\n".join([title, "", f"| flag | {column} |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(Path(sys.argv[1]).read_text().split()), end="")
