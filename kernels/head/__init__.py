"""Shared parts of the output head's ops: GEMMs, chunks, tiles, shards, the objective."""
