"""Starts the ranks of a node out of one process that has imported everything, and restarts them in place."""
