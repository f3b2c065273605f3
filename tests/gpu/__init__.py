"""The GPU tier: what only a machine with a CUDA device shows, in parts that run.sh starts; see docs/gpu.md."""
