"""No op makes a tensor on the caller's default device, the CPU's twin of `torch.set_default_device("cuda")`."""

import pytest
from every_op import CALLS, check_the_default_device_is_not_used


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_the_default_device_is_not_used(name, implementation, monkeypatch):
    if name != "pack" or implementation != "cpu":  # which has none
        monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_the_default_device_is_not_used(name)
