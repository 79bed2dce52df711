"""What `benchmarks/pipeline.py --simulate` plays with rollout/simulation/, and how it tells it: fit, grid, tables, pictures."""
