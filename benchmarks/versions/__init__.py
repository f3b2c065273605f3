"""Whether this version saves, loads, reshards and restarts as fast as another one, both measured in turn."""
