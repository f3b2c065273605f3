"""Saves in memory that outlives a rank, and their copies on other hosts: who holds which, who sends them."""
