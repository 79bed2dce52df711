"""Training from groups of samples: advantages, packing, the Megatron learner, weight sync, and the training loop."""
