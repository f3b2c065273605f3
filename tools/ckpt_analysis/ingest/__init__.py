"""Reads the files of a trace: `load` returns the valid records of one run, with all times on one clock."""
