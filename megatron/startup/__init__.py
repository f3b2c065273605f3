"""From the command line to ranks that can train: checks before imports, imports, rendezvous, injected faults."""
