"""Engines `dcp` and `dcp-async`: torch.distributed.checkpoint."""
