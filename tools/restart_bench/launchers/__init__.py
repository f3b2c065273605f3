"""How the ranks are started: a module per launcher."""
