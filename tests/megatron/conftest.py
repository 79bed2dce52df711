"""Helpers of this folder are importable by name; the process groups of one test do not reach into the next."""

from megatron_models import own_groups  # noqa: F401
