"""Player of episodes: in stages for training, concurrently or alternately with the trainer, and for evaluations."""
