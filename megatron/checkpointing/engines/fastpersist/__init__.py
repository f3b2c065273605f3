"""Engines `fastpersist` and `fastpersist-decoupled`: DeepSpeed's writer, here or in a process of its own."""
