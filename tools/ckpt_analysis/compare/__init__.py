"""Comparison of runs: `compare_runs` takes reports and returns a Comparison, which commands and the HTML report show.

`metrics` collects the samples of each run, `common/statistics.py` of tools tests them, `conditions` evaluates
--fail-if, `targets` evaluates --target. docs/comparing.md says what is tested and how.
"""
