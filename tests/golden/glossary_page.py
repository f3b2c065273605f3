"""Prints docs/glossary.md, from the entries that the page of a report shows.

python -m tests.golden.glossary_page > docs/glossary.md
"""

from __future__ import annotations

from tools.ckpt_analysis.common.glossary import ENTRIES, UNITS

_HEAD = """\
# Glossary

One word for one thing, in JSON, tables, pages and documents. `python -m tests.golden.glossary_page` prints this page
from `tools/ckpt_analysis/common/glossary.py`. JSON keys, table heads and labels consist of the words in the last
column, of phases and fields in [log_format.md](log_format.md), and of the units below; [metrics.md](metrics.md)
and [comparing.md](comparing.md) define what other keys there are.

| term | unit | definition | in names |
|---|---|---|---|
"""
_UNITS = """
GB is 1e9 bytes, GiB 2^30; GBps in a key is GB/s. Units, statistics and words that join them: """


def page() -> str:
    """The page, with a row for each entry."""
    rows = []
    for entry in ENTRIES:
        more = f" ([more]({entry.see}))" if entry.see else ""
        names = ", ".join(f"`{name}`" for name in entry.names)
        rows.append(f"| {entry.term} | {entry.unit} | {entry.definition}{more} | {names} |\n")
    return _HEAD + "".join(rows) + _UNITS + ", ".join(f"`{word}`" for word in UNITS) + ".\n"


if __name__ == "__main__":
    print(page(), end="")
