"""How fast the analysis is, beside a plain pandas implementation of the same summary.

`python -m benchmarks.analysis_speed DIR` makes logs, runs both and prints a table; docs/results/analysis_speed.md
is its output.
"""
