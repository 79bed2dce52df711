"""Megatron-core part of the trainer. Call shim.install() before importing any other module of this folder."""
