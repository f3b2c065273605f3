"""Writing a checkpoint over all ranks, at once or in the background."""
