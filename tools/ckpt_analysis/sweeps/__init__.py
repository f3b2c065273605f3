"""Reads sweeps, from the directory that tools/restart_sweep writes or a bundle of it, and compares their cells.

`read` finds the cells, `samples` gets the values of one, `groups` joins comparable cells, `rows` writes all values as
one table, `several` compares sweeps; `bundle` packs a sweep into an archive and unpacks it; `rules` checks
docs/rules.md.
"""
