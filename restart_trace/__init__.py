"""The instrument: per-rank, per-phase records of saves, loads and start-ups, one JSONL file per process.

Importing it imports the standard library only, and nothing from the rest of the project. docs/log_format.md specifies
the file format.
"""
