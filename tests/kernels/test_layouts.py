"""Every tensor of every op in every layout, on each implementation that a CPU has."""

import pytest
from layout_cases import OPS, check_every_layout

IMPLEMENTATIONS = {
    **dict.fromkeys(OPS, ("cpu", "reference")),
    # the reference leaves the gradient of the weight to autograd
    **{name: ("cpu",) for name in OPS if "main_grad" in name},
    "pack": ("reference",),
    "kept_rows": ("reference",),
    "attention_decode": ("cpu", "torch", "reference"),
}


@pytest.mark.parametrize(("op", "implementation"), [(op, each) for op in OPS for each in IMPLEMENTATIONS[op]])
def test_every_tensor_is_read_as_it_lies(op, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_every_layout(op)
