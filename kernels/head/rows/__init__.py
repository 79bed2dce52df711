"""Kernels for rows of logits: one interface, with an implementation for CPUs and one in Triton."""
