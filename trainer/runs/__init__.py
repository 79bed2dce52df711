"""A run on disk and across ranks: directory, lock, checkpoints, heartbeats, and the final message."""
