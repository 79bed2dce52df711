"""One policy's model and optimizer, and what an update of it tells."""
