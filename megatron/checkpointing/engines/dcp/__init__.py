"""Engines `dcp`, `dcp-async` and `dcp-process`: torch.distributed.checkpoint."""
