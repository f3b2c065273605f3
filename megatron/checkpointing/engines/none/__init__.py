"""Engine `none`: writes nothing, and so measures what is left."""
