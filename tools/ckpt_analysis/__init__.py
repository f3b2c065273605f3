"""Offline analysis of restart traces: a directory of per-rank records to numbers, tables and words.

Imports nothing of the project but `restart_trace.schema`, and never torch. docs/log_format.md
describes what it reads, docs/metrics.md defines every number that it gives.
"""
