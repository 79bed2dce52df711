"""What happens to a chunk of logits, row by row: one protocol, and an implementation a folder of hardware."""
