"""Model directories: downloads, and exports of checkpoints."""
