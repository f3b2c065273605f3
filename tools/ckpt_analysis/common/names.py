"""Small types for the few words that millions of records repeat, and the columns that record files are read into."""

from __future__ import annotations

import polars as pl

from restart_trace.schema import PHASES, RECORD_FIELDS

# Names of phases and details as one small type: grouping and sorting millions of spans by text is slow.
NAME = pl.Enum(
    sorted({"", *(n for ps in PHASES.values() for p, details in ps.items() for n in (p, *details))})
)
OPERATION = pl.Enum(list(PHASES))
RECORD_TYPE = pl.Enum(list(RECORD_FIELDS))

FILE = "file_index"  # which file a record came from: its place in the list of files

_POLARS_TYPES = {"int": pl.Int64(), "float": pl.Float64(), "str": pl.String(), "bool": pl.Boolean()}
# Process records are read apart, as objects; each further column costs time with every record.
COLUMN_TYPES: dict[str, str] = {
    name: field.json_type
    for record_type, fields in RECORD_FIELDS.items()
    if record_type != "process"
    for name, field in fields.items()
    if field.json_type in _POLARS_TYPES
}
SCHEMA: dict[str, pl.DataType] = {name: _POLARS_TYPES[kind] for name, kind in COLUMN_TYPES.items()}
SCHEMA["values"] = pl.String()  # an object arrives as its JSON text

# Every record says these of itself; `file_index` goes with them.
WHO = ["run_id", "cycle", "rank"]
_COMMON = {"v", "type", *WHO, "tp", "pp", "dp"}
# Columns of each type of record beside WHO.
TYPE_SCHEMAS: dict[str, dict[str, pl.DataType]] = {
    record_type: {name: SCHEMA[name] for name in fields if name in SCHEMA and name not in _COMMON}
    for record_type, fields in RECORD_FIELDS.items()
    if record_type != "process"
}
