"""Model directories: random models, downloads, and exports of checkpoints."""
