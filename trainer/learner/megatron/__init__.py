"""The Megatron-core side of the trainer. Call shim.install() before importing any other module of this folder."""
