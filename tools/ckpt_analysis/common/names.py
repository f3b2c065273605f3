"""The columns that trace files are read into; phase names are an Enum, since millions of records repeat them."""

from __future__ import annotations

import polars as pl

from restart_trace.schema import PHASES, RECORD_FIELDS, SPAN

# Names of phases and details as one small type: grouping and sorting millions of spans by text is slow.
NAME = pl.Enum(sorted({"", *(n for ps in PHASES.values() for p, details in ps.items() for n in (p, *details))}))
OPERATION = pl.Enum(list(PHASES))

FILE = "file_index"  # which file a record came from: its place in the list of files
LINE = "line"  # a number that grows from record to record of a file

_POLARS_TYPES = {"int": pl.Int64(), "float": pl.Float64(), "str": pl.String(), "bool": pl.Boolean()}
# Columns of each type of record but `type`. Process records are read apart, as objects. What nothing here uses is left
# out: each further column costs time with every record.
_UNUSED = {("event", "wall_ns")}
_SMALL_TYPES = {
    (SPAN, "phase"): NAME,
    (SPAN, "detail"): NAME,
    (SPAN, "file"): pl.Categorical(),
    (SPAN, "thread"): pl.Categorical(),
    (SPAN, "error"): pl.Categorical(),
    ("operation_begin", "operation"): OPERATION,
}
TYPE_SCHEMAS: dict[str, dict[str, pl.DataType]] = {
    record_type: {
        # An object arrives as its JSON text.
        name: _SMALL_TYPES.get((record_type, name), _POLARS_TYPES.get(field.json_type, pl.String()))
        for name, field in fields.items()
        if name != "type" and (record_type, name) not in _UNUSED
    }
    for record_type, fields in RECORD_FIELDS.items()
    if record_type != "process"
}
