"""From groups to micro-batches: credit, mini-batches, packing, and distribution to ranks."""
