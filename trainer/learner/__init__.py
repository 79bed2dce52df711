"""One policy's model and optimizer, and the statistics of its updates."""
