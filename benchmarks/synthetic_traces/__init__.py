"""Restart traces of a made-up run whose truth is known, from a handful of ranks to ten thousand.

`python -m benchmarks.synthetic_traces DIR` writes one, with `truth.json`: what the analysis must find in it.
docs/ckpt_analysis.md describes the run and the problems that can be planted in it.
"""
