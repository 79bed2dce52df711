"""The player of episodes: for training in stages, concurrent with or alternating with the trainer, and for evaluations."""
