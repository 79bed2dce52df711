"""Shared parts of the ops that fuse the output head (the vocabulary projection) with a loss or log-probs."""
