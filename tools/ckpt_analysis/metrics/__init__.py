"""What is computed of the frames: times, volumes, restarts, lost work. docs/metrics.md defines every number."""
