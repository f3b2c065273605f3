"""What a process asks of its host: to end with its parent, and a port that is free."""
