"""The implementations of the row kernels in order of preference, and why one cannot serve."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.dispatch import late_object, why_not_host
from marsrl.kernels.head.rows.protocol import RowKernels
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import machine_lacks_triton, why_not_triton


@dataclass(frozen=True)
class RowProvider:
    """An implementation that is loaded when it is first used.

    machine_lacks: None where this machine can run it, else the reason. why_not_tensor: the same for one argument, given
    its name and a tensor; why_not_together: for all of them. takes_support: a logit of -inf is seen by its statistics.
    """

    name: str
    load: Callable[[], RowKernels]
    machine_lacks: Callable[[], str | None]
    why_not_tensor: Callable[[str, Tensor], str | None]
    why_not_together: Callable[[dict[str, Tensor]], str | None] = lambda tensors: None
    takes_support: bool = True

    def why_not(self, **tensors: Tensor) -> str | None:
        """None where these arguments, named as the caller knows them, can be served; else the reason."""
        for name, tensor in tensors.items():
            reason = self.why_not_tensor(name, tensor)
            if reason is not None:
                return reason
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float64:
                return f"float64 input ({name}), the row kernels compute in float32"
        return self.why_not_together(tensors)

    def why_not_head(self, hidden: Tensor, weight: Tensor, head: Head) -> str | None:
        """None where this call of a head can be served; else the reason."""
        if head.support is not None and not self.takes_support:
            return "support is given, and its statistics come from the product, before columns are left out"
        return self.why_not(hidden=hidden, weight=weight)


def _why_not_first_gemm(tensors: dict[str, Tensor]) -> str | None:
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    if "float32" in dtypes.values():
        return (
            f"{found}: tensor cores would round float32 to TF32, which has 10 bits; cuBLAS multiplies float32 in full"
        )
    if len(set(dtypes.values())) > 1:
        return f"{found}: tensor cores multiply pairs of one dtype"
    return None


ROW_PROVIDERS = (
    RowProvider(
        "triton", late_object("head.rows.triton_impl", "TritonRowKernels"), machine_lacks_triton, why_not_triton
    ),
    RowProvider("cpu", late_object("head.rows.cpu", "CpuRowKernels"), library.why_no_cpu_library, why_not_host),
)

# Those of the heads. The last one has a first GEMM of its own and is taken by name only, as in
# MARSRL_KERNELS=linear_policy_loss=triton_gemm: whatever it can serve `triton` serves too, until a measurement says that it
# should come first.
HEAD_PROVIDERS = (
    *ROW_PROVIDERS,
    RowProvider(
        "triton_gemm",
        late_object("head.first_gemm.triton_impl", "TritonFirstGemm"),
        machine_lacks_triton,
        why_not_triton,
        _why_not_first_gemm,
        takes_support=False,
    ),
)
