"""Interchangeable checkpoint engines: a package per engine, named in `registry`; what several use lies beside them."""
