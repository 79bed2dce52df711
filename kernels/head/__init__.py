"""Shared by the ops of the output head: GEMMs, chunks, tiles, shards, the objective."""
