"""Make this folder's helpers importable by name, and give each test its own process groups."""

from megatron_models import own_groups  # noqa: F401
