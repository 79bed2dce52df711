"""A tile of the vocabulary on csrc/cpu: float32 logits to statistics and bfloat16 exponentials, and those to gradients."""

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.head.rows.cpu_calls import c_statistics, c_temperature
from marsrl.kernels.head.rows.protocol import Statistics
from marsrl.kernels.head.vocabulary import Head


class CpuTileKernels:
    """TileKernels through ctypes; threads over rows."""

    def exponentials(
        self, logits: Tensor, head: Head, targets: Tensor, inverse_temperature: Tensor, partials: Tensor, out: Tensor
    ) -> None:
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
            out.shape[1],
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
        library.cpu_library().marsrl_exponential_gradients(
            exponentials.data_ptr(),
            exponentials.shape[1],
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
