"""A run on disk and across ranks: directory, lock, heartbeats, collectives, and the final message."""
