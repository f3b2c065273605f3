"""What is saved: the state of training, its layout, its hashes, the flags it depends on."""
