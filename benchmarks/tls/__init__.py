"""What TLS between the parts of a launch costs a copy of a save."""
