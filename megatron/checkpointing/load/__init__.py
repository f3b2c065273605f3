"""Finding the checkpoint to go on from, and loading it, over all ranks."""
