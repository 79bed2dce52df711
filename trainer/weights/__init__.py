"""From the trainer's weights to every engine's, and the proof that they arrived."""
