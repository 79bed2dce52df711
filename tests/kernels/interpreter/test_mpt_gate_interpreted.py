"""mpt_gate in Triton: the same tests as for the C++ implementation."""

from test_mpt_gate import *  # noqa: F403
