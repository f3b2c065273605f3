"""Connections between the parts of a launch: secret, handshake, TLS, frames, and where to listen."""
