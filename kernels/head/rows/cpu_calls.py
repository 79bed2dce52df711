"""Arguments that the functions of csrc/cpu share, in the order of the C interface."""

from torch import Tensor

from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.library import address


def c_rows(logits: Tensor, stride: int, rows: Rows, head: Head) -> tuple[int | None, ...]:
    """Which rows, and their targets: how the row functions of the C interface begin. stride: of logits, in elements."""
    return (
        logits.data_ptr(),
        stride,
        rows.count,
        head.num_columns,
        address(rows.ids),
        rows.first,
        head.targets.data_ptr(),
    )


def c_temperature(head: Head) -> tuple[int | None, float]:
    """Inverse temperatures: where those of the tokens lie, and the one of all tokens, which is read where that is null."""
    return address(head.inverse_temperature), head.inverse_temperature_of_all


def c_statistics(statistics: Statistics) -> tuple[int, ...]:
    """Where the statistics of the tokens lie, in the order of the C interface."""
    of = statistics
    return of.logprobs.data_ptr(), of.entropy.data_ptr(), of.maximum.data_ptr(), of.log_sum.data_ptr()
