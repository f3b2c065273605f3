"""Interchangeable checkpoint engines: one file per engine, named in `registry`."""
