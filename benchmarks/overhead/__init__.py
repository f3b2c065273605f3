"""What measuring costs: traced against untraced saves and loads, and the torch engine against plain torch.save."""
