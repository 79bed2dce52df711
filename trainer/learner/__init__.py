"""Learner of one policy: its model and optimizer, and the statistics of its updates."""
