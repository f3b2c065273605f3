"""A cluster of Linux namespaces on one machine, and tests of what takes several hosts."""
