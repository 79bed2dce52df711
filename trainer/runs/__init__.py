"""A run on disk and among ranks: its directory, its lock, checkpoints, who lives, what is said last."""
