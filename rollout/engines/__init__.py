"""Engines that decode tokens: vLLM (through Ray or in this process), a local forward pass, or a script for tests."""
