"""From groups to micro-batches: who gets how much credit, how a step is cut, packed and shared out among ranks."""
