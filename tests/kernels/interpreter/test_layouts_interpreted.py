"""Every tensor of every op in every layout, on Triton."""

import pytest
from layout_cases import OPS, check_every_layout

# one head of each kind: a call takes the interpreter a quarter of a second, and one has 20 tensors in 4 layouts
HEADS = ("linear_logprob, float32", "linear_policy_loss with main_grad, bfloat16")


@pytest.mark.parametrize("op", [op for op in OPS if op in HEADS or not op.startswith("linear_")])
def test_every_tensor_is_read_as_it_lies(op):
    check_every_layout(op)


@pytest.mark.parametrize("op", ["linear_logprob without support, bfloat16"])
def test_every_tensor_of_the_heads_own_product_is_read_as_it_lies(op, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "linear_policy_loss=triton_gemm,linear_logprob=triton_gemm")
    check_every_layout(op)
