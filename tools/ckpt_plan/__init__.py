"""Every file of a checkpoint, with its exact size, before anything is run: of any model and layout, without a GPU."""
