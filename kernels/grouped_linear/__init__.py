"""Linear layers of experts: each expert's weight multiplies the rows that are routed to the expert."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, INTEGERS, check
from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.dispatch import Op, of_first, why_not_host
from marsrl.kernels.grouped_linear.cpu import CpuGroupedLinear
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference
from marsrl.kernels.grouped_linear.torch_impl import TorchGroupedLinear, why_not_grouped_mm
from marsrl.kernels.main_grad import MainGrad, check_main_grad
from marsrl.kernels.traced_op import register
from marsrl.kernels.triton_machine import machine_lacks_cuda, why_not_triton_float32


def grouped_linear(
    x: Tensor, weights: Tensor, tokens_per_expert: Tensor | Sequence[int], *, main_grad: Tensor | None = None
) -> Tensor:
    """Multiply the rows of x, sorted by expert, by the transposed weight of their expert; differentiable.

    Args:
        x: [T, K] float.
        weights: [E, N, K] in the dtype of x; N may be several dimensions, as in [E, 2, N / 2, K].
        tokens_per_expert: [E] int tensor or list: the number of rows of each expert; they sum to T. The host does not read
            a tensor on the GPU: its values are not checked, and output rows beyond their sum are undefined.
        main_grad: float32 in the shape of weights, each expert's part contiguous. Each backward adds dW to it, but does not touch
            experts without rows; a forward writes nothing. Autograd then gets None, or a placeholder for Megatron's hooks, as the
            gradient of weights (see linear_policy_loss). With main_grad, torch.compile breaks its graph at this op.

    Returns:
        [T, N] in the dtype of x.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("grouped_linear", "x", x, (None, None), FLOATS)
    num_between = max(1, getattr(weights, "ndim", 0) - 2)
    check("grouped_linear", "weights", weights, (None,) * (1 + num_between) + (x.shape[1],), (x.dtype,), x.device)
    if not isinstance(tokens_per_expert, Tensor):
        tokens_per_expert = torch.tensor(tokens_per_expert, dtype=torch.int64, device="cpu")
    matrices = weights.flatten(1, -2)
    if main_grad is None:
        if torch.compiler.is_compiling():
            return torch.ops.marsrl.grouped_linear(x, matrices, tokens_per_expert)
        return _OP(*_checked(x, matrices, tokens_per_expert))
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="grouped_linear writes main_grad, which a torch.library op cannot pass to its backward"
        )
    check_main_grad("grouped_linear", weights, main_grad)
    if not main_grad[:1].is_contiguous():
        raise ValueError(
            f"grouped_linear: main_grad has strides {main_grad.stride()}, expected contiguous memory for each expert"
        )
    return _OP(*_checked(x, matrices, tokens_per_expert, MainGrad(weights, main_grad.flatten(1, -2))))


def _checked(
    x: Tensor, weights: Tensor, tokens_per_expert: Tensor, main_grad: MainGrad | None = None
) -> tuple[Tensor, Tensor, Tensor, MainGrad | None]:
    num_experts, is_on_host = weights.shape[0], tokens_per_expert.device.type == "cpu"
    device = None if is_on_host else x.device
    check("grouped_linear", "tokens_per_expert", tokens_per_expert, (num_experts,), INTEGERS, device)
    if is_on_host:
        counts = tokens_per_expert.tolist()
        if sum(counts) != x.shape[0] or any(count < 0 for count in counts):
            raise ValueError(
                f"grouped_linear: tokens_per_expert is {counts}, "
                f"expected {num_experts} counts that add up to {x.shape[0]} rows"
            )
    return x, weights, tokens_per_expert, main_grad


def _results(x: Tensor, weights: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor]:
    return (x.new_empty(x.shape[0], weights.shape[1]),)


def _reference(x: Tensor, weights: Tensor, tokens_per_expert: Tensor, main_grad: None) -> Tensor:
    return grouped_linear_reference(x, weights, tokens_per_expert)


def _why_not_reference(x: Tensor, weights: Tensor, tokens_per_expert: Tensor, main_grad: MainGrad | None) -> str | None:
    if main_grad is None:
        return None
    return "main_grad is given, but the reference computes the gradient of the weights by autograd"


_GRADIENT = Gradient("grouped_linear", num_tensors=3)
_OP = Op(
    "grouped_linear",
    (
        _GRADIENT.implementation("torch", TorchGroupedLinear, why_not_grouped_mm, machine_lacks_cuda),
        _GRADIENT.triton("grouped_linear.triton_impl", "TritonGroupedLinear", of_first(why_not_triton_float32, "x")),
        _GRADIENT.implementation("cpu", CpuGroupedLinear, of_first(why_not_host, "x")),
        _GRADIENT.reference(_reference, _why_not_reference),
    ),
)
register(_OP, _GRADIENT, "Tensor x, Tensor weights, Tensor tokens_per_expert", _results, 1, _checked)
