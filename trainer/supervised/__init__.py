"""Supervised training on demonstrations, from a user's file or the warm start, with the same learner as RL."""
