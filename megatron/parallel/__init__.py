"""Ranks: topology, host-side agreement, and tensor-parallel layers on plain torch.distributed (arXiv:1909.08053)."""
