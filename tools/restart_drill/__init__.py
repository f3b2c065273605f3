"""Kill a training in a chosen way at a chosen moment, start it again, verify it and account for every second."""
