"""Where checkpoints are kept: names, manifests, commit, ownership, removal; in `bucket`, object storage."""
