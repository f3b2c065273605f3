"""Checkpoints in object storage: ownership of the prefix, saving, finding and fetching."""
