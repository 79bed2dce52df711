"""Engine that uses vLLM."""
