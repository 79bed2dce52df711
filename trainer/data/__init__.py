"""Preparation of training batches: credit, mini-batches, packing, and distribution to ranks."""
