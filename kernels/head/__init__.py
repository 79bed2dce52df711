"""What the ops of the output head share: GEMMs, sweeps, shards, the objective."""
