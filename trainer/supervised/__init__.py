"""Supervised training: demonstrations of a user's file or of the warm start's tutors, on the learner that does RL."""
