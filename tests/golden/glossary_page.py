"""Prints docs/glossary.md, from the entries that the page of a report shows.

python -m tests.golden.glossary_page > docs/glossary.md
"""

from __future__ import annotations

from tools.ckpt_analysis.common.glossary import ENTRIES

_HEAD = """\
# Glossary

One word for one thing. `python -m tests.golden.glossary_page` prints this page from
`tools/ckpt_analysis/common/glossary.py`. JSON keys, table heads and labels consist of terms and the words in the last
column, of phases and fields in [log_format.md](log_format.md), of units, statistics and words that join them;
[metrics.md](metrics.md) and [comparing.md](comparing.md) define other keys, [ckpt_plan.md](ckpt_plan.md),
[ckpt_replay.md](ckpt_replay.md) and [restart_drill.md](restart_drill.md) those of their commands. GB is 1e9 bytes, GiB
2^30; GBps in a key is GB/s.

| term (unit) | definition | also in names |
|---|---|---|
"""


def page() -> str:
    """The page, with a row for each entry."""
    rows = []
    for entry in ENTRIES:
        unit = f" ({entry.unit})" if entry.unit else ""
        more = f" ([more]({entry.see}))" if entry.see else ""
        names = ", ".join(f"`{name}`" for name in entry.names if name != entry.term)
        rows.append(f"| {entry.term}{unit} | {entry.definition}{more} | {names} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
