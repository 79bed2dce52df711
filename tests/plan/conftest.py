"""Make this folder's helpers and the tiny models of tests/megatron importable by name; process groups do not outlive a test."""

from megatron_models import own_groups  # noqa: F401
