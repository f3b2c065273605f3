"""Computes numbers from the frames: times, volumes, restarts, lost work. docs/metrics.md defines each number."""
