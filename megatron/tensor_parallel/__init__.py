"""Tensor-parallel layers on plain torch.distributed (Megatron-LM, arXiv:1909.08053)."""
