"""Replays the checkpoints of chosen ranks with the real engines, and measures them and the storage itself."""
