"""Copies of saves in the memory of other hosts: who holds whose, the process that sends and takes them, its client."""
