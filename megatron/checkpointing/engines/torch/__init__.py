"""Engine `torch`: torch.save per file."""
