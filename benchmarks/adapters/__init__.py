"""How long training waits for a save in a trainer of others: by torch.save, by its own library, by engine lazy."""
