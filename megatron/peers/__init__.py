"""Keeps saves in host memory that outlives the ranks, and copies of them in the memory of other hosts."""
