"""Implementations of the row kernels in order of preference, each with the reasons why it cannot serve a call."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.checks import why_not_double
from marsrl.kernels.dispatch import late_object, why_not_host
from marsrl.kernels.head.rows.protocol import RowKernels
from marsrl.kernels.triton_machine import machine_lacks_triton, why_not_triton


@dataclass(frozen=True)
class RowProvider:
    """Implementation of the row kernels, loaded at its first use.

    machine_lacks: returns None if this machine can run the kernels, else the reason.
    why_not_tensor: takes an argument's name and tensor; returns None if the kernels can read the tensor, else the reason.
    """

    name: str
    load: Callable[[], RowKernels]
    machine_lacks: Callable[[], str | None]
    why_not_tensor: Callable[[str, Tensor], str | None]

    def why_not(self, **tensors: Tensor) -> str | None:
        """Return None if the kernels can read these tensors, else the reason.

        The reason calls the tensors by their keywords.
        """
        for why_not in (self.why_not_tensor, why_not_double):
            for name, tensor in tensors.items():
                if (reason := why_not(name, tensor)) is not None:
                    return reason
        return None


ROW_PROVIDERS = (
    RowProvider(
        "triton", late_object("head.rows.triton_impl", "TritonRowKernels"), machine_lacks_triton, why_not_triton
    ),
    RowProvider("cpu", late_object("head.rows.cpu", "CpuRowKernels"), library.why_no_cpu_library, why_not_host),
)
