"""The real vLLM as an engine."""
