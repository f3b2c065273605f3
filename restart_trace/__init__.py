"""The instrument: per-rank, per-phase records of saves, loads and start-ups, one JSONL file per process.

Imports nothing of the rest of the project and no third party at import time. docs/log_format.md is its
contract.
"""
