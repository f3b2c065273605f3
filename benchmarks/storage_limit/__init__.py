"""How fast the bytes of a checkpoint can be written and read on this storage, in which ways."""
