"""Plans a checkpoint: every file with its exact size, for any model and layout, without a GPU and without a run."""
