"""Writes tables as Parquet or CSV; an error says what the system reported of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from ...common.escaping import csv_cell

_CSV_ROWS_AT_ONCE = 500_000
_PROBE_BYTES = 1 << 20
# Text that `csv_cell` may change: looked for by polars, which is fast.
_TO_ESCAPE = r"[\p{Cc}\p{Cf}\x{2028}\x{2029}]|^[=+@-]"


def write_table(table: pl.DataFrame, path: Path, file_format: str, **options: Any) -> None:
    """Write "parquet" or "csv"; `options` are those of polars. Raises OSError."""
    try:
        if file_format == "parquet":
            table.write_parquet(path, **options)
        else:
            _for_csv(table).write_csv(path, batch_size=_CSV_ROWS_AT_ONCE, **options)
    except pl.exceptions.PolarsError as exc:
        # polars wraps what the system said, if it keeps it at all: on a full disk this says it once more.
        with path.open("wb") as stream:
            stream.write(bytes(_PROBE_BYTES))
        raise OSError(str(exc)) from exc


def _for_csv(table: pl.DataFrame) -> pl.DataFrame:
    """A table whose columns of text are as `csv_cell` makes them."""
    changed = []
    for column in table.get_columns():
        if column.dtype != pl.String and not isinstance(column.dtype, pl.Categorical):
            continue
        texts = column.unique().drop_nulls().cast(pl.String)
        texts = texts.filter(texts.str.contains(_TO_ESCAPE))
        if not texts.is_empty():
            cells = [csv_cell(text) for text in texts]
            changed.append(column.cast(pl.String).replace(texts, pl.Series(cells, dtype=pl.String)))
    return table.with_columns(changed)
