"""One player of episodes: for training in stages, beside the trainer or in turn with it, and for evaluations."""
