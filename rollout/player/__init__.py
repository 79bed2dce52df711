"""Player of episodes: in stages for training, beside the trainer or in turn with it, and for evaluations."""
