"""What the ops of the output head share: GEMMs, chunks, tiles, shards, the objective."""
