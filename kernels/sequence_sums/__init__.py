"""Sums over the trained tokens of packed sequences, for mpt_gate and sequence-level ratios."""

from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.dispatch import Implementation, Op, late_function, of_first, why_not_host
from marsrl.kernels.sequence_sums.cpu import sequence_sums_cpu
from marsrl.kernels.sequence_sums.reference import sequence_sums_reference
from marsrl.kernels.triton_machine import machine_lacks_triton, why_not_triton


def sequence_sums(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return the sum of each sequence's values in the mask, and their number, [2, S] float64.

    values: [T], any float dtype; not read where mask is False.
    mask: [T] bool; None: all tokens.
    cu_seqlens: [S+1] int.

    The arguments are not checked.
    """
    return _OP(values, mask, cu_seqlens)


_OP = Op(
    "sequence_sums",
    (
        Implementation("cpu", sequence_sums_cpu, of_first(why_not_host, "values"), library.why_no_cpu_library),
        Implementation(
            "triton",
            late_function("sequence_sums.triton_impl", "sequence_sums_triton"),
            of_first(why_not_triton, "values"),
            machine_lacks_triton,
        ),
        Implementation("reference", sequence_sums_reference),
    ),
)
