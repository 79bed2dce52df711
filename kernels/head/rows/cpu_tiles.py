"""A tile of the vocabulary on csrc/cpu: float32 logits to statistics and bfloat16 exponentials, and those to gradients."""

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.head.rows.cpu_calls import c_statistics, c_temperature
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.vocabulary import Head


class CpuTileKernels:
    """Logits of a tile of the vocabulary, which leave bfloat16 exponentials behind, and the gradients from those; threads
    over rows."""

    def exponentials(
        self, logits: Tensor, head: Head, targets: Tensor, inverse_temperature: Tensor, partials: Tensor, out: Tensor
    ) -> None:
        """partials [4, R] as RowKernels.partials gives them, and out [R, columns] bfloat16 = e^d, 0 in padding; its
        rows may lie apart.

        logits [R, columns] float32, row-major; head: Head.tile of these columns; targets, inverse_temperature [R].
        """
        local = targets - head.first_column
        library.cpu_library().marsrl_row_partials(
            logits.data_ptr(),
            logits.shape[1],
            logits.shape[0],
            head.num_columns,
            local.data_ptr(),
            inverse_temperature.data_ptr(),
            partials.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )

    def gradients(
        self,
        exponentials: Tensor,
        maxima: Tensor,
        kept: Tensor,
        tokens: Tensor,
        head: Head,
        statistics: Statistics,
        coefficient: Tensor,
        entropy_coefficient: Tensor,
        out: Tensor,
    ) -> None:
        """out [n, columns] float32 = dz of the rows kept [n] int64 of exponentials [R, columns], whose tokens are given.

        maxima [R] float64: the first line of their partials. dz as RowKernels.gradients has it, that of the target from
        the float32 statistics.
        """
        library.cpu_library().marsrl_exponential_gradients(
            exponentials.data_ptr(),
            exponentials.stride(0),
            maxima.data_ptr(),
            kept.data_ptr(),
            tokens.data_ptr(),
            kept.numel(),
            head.num_columns,
            head.targets.data_ptr(),
            head.first_column,
            *c_temperature(head),
            *c_statistics(statistics),
            coefficient.data_ptr(),
            entropy_coefficient.data_ptr(),
            out.data_ptr(),
            out.shape[1],
            torch.get_num_threads(),
        )
