"""The performance that engine lazy is to reach: `python -m tools.ckpt_replay --targets` and the table of several."""
