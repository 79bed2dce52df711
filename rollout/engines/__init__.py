"""Engines that decode tokens: vLLM, the built-in local engine, a server with OpenAI's API, or a script for tests."""
