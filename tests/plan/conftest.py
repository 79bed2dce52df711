"""Make helpers of this folder and tests/megatron importable; give each test its own process groups."""

from megatron_models import own_groups  # noqa: F401
