"""Helpers of this folder and the tiny models of tests/megatron are importable by name; groups do not outlive a test."""

from megatron_models import own_groups  # noqa: F401
