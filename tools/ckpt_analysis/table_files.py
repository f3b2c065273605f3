"""Tables to files, with errors that say what is wrong with the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

_CSV_ROWS_AT_ONCE = 500_000
_PROBE_BYTES = 1 << 20


def write_table(table: pl.DataFrame, path: Path, file_format: str, **options: Any) -> None:
    """Write "parquet" or "csv"; `options` are those of polars. Raises OSError."""
    try:
        if file_format == "parquet":
            table.write_parquet(path, **options)
        else:
            table.write_csv(path, batch_size=_CSV_ROWS_AT_ONCE, **options)
    except pl.exceptions.PolarsError as exc:
        # polars wraps what the system said, if it keeps it at all: on a full disk this says it once more.
        with path.open("wb") as stream:
            stream.write(bytes(_PROBE_BYTES))
        raise OSError(str(exc)) from exc
