"""mpt_gate in Triton: the tests of the C++ once more."""

from test_mpt_gate import *  # noqa: F403
