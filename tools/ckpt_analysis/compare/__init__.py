"""Runs side by side: `compare_runs` takes reports and gives a Comparison, which commands and the HTML report show.

`metrics` collects the samples of each run, `statistics` tests them, `conditions` holds --fail-if, `render` prints.
docs/comparing.md says what is tested and how.
"""
