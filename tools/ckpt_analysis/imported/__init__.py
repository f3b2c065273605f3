"""Runs that were not instrumented, read from the log that they left: `import` writes them, the reports read them.

`reader` turns lines into an `ImportedRun` (model), `file` keeps it as `imported.json`, `to_report` gives the Report
that a trace would give, with None wherever the log does not say. docs/log_format.md describes the file.
"""
