"""Logs of runs without a trace: `ckpt-analysis import` reads them, and the other commands read what it writes.

`reader` turns lines into an `ImportedRun` (model/imported_run.py), `file` stores it as `imported.json`, `to_report`
turns it into a Report, with None for everything that the log does not say. docs/log_format.md describes the file.
"""
