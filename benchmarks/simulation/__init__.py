"""The project's scheduler on a virtual clock: simulated engines, lengths and costs. `benchmarks/pipeline.py` runs it."""
