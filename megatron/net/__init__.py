"""Connections between the parts of a launch: the secret, the handshake, who is let in, where to listen."""
