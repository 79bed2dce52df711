"""Model directories: made with random weights, and exported from a checkpoint."""
