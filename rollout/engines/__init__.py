"""Engines decode tokens: vLLM (through Ray or in this process), our local forward, or a script for tests."""
