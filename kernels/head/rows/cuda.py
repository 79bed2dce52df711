"""The row kernels of csrc/cuda: work queued on the current stream, one thread block a row."""

import ctypes

import torch
from torch import Tensor

from marsrl.kernels.cuda_library import cuda_library, queue
from marsrl.kernels.head.objective import METRICS, PolicyTokens
from marsrl.kernels.head.rows.cpu import c_objective, c_tokens
from marsrl.kernels.head.rows.cpu_calls import c_rows, c_statistics, c_temperature
from marsrl.kernels.head.rows.protocol import PolicyTerms, Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.library import address


class CudaRowKernels:
    """RowKernels through ctypes; no call waits for the device. Temporaries are freed in the order of the stream."""

    is_host = False
    tiles = None
    first_gemm = None

    def statistics(self, logits: Tensor, rows: Rows, head: Head, out: Statistics) -> None:
        queue(
            "row_logprobs",
            logits,
            *c_rows(logits, logits.stride(0), rows, head),
            *c_temperature(head),
            *c_statistics(out),
        )

    def partials(self, logits: Tensor, rows: Rows, head: Head) -> Tensor:
        local = rows.take(head.targets) - head.first_column
        inverse = head.inverse_temperature_at(rows)
        partials = torch.empty(4, rows.count, dtype=torch.float64, device=logits.device)
        queue(
            "row_partials",
            logits,
            logits.data_ptr(),
            logits.stride(0),
            rows.count,
            head.num_columns,
            local.data_ptr(),
            inverse.data_ptr(),
            partials.data_ptr(),
        )
        return partials

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        return CudaPolicyTerms(tokens, logprobs, entropy)

    def gradients(
        self,
        logits: Tensor,
        rows: Rows,
        head: Head,
        statistics: Statistics,
        coefficient: Tensor,
        entropy_coefficient: Tensor,
        out: Tensor,
        active: Tensor | None,
    ) -> LateCount:
        assert active is not None, "csrc/cuda leaves out the rows without a coefficient"
        num_active = torch.empty(1, dtype=torch.int64, device=logits.device)
        slots = torch.empty(rows.count, dtype=torch.int64, device=logits.device)
        scratch = torch.empty(
            cuda_library().marsrl_cuda_active_scratch(rows.count), dtype=torch.int64, device=logits.device
        )
        queue(
            "active_rows",
            logits,
            rows.count,
            address(rows.ids),
            rows.first,
            coefficient.data_ptr(),
            entropy_coefficient.data_ptr(),
            slots.data_ptr(),
            active.data_ptr(),
            num_active.data_ptr(),
            scratch.data_ptr(),
        )
        count = LateCount(num_active)  # its copy is queued before the gradients: it is there when the host asks
        queue(
            "row_gradients",
            logits,
            *c_rows(logits, logits.stride(0), rows, head),
            head.first_column,
            *c_temperature(head),
            *c_statistics(statistics),
            coefficient.data_ptr(),
            entropy_coefficient.data_ptr(),
            slots.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            head.width,
            out.dtype == torch.bfloat16,
        )
        return count


class CudaPolicyTerms:
    """PolicyTerms on the device; sums in double, in an order that the number of tokens fixes."""

    in_one_walk = None

    def __init__(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor):
        device, normaliser, inverse = logprobs.device, tokens.normaliser, 1.0
        self.coefficient, self.entropy_coefficient = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        self._sums = torch.zeros(tokens.num_agents, len(METRICS), dtype=torch.float64, device=device)
        self._held = tokens, logprobs, entropy  # the structures hold addresses only
        self._inverse_normaliser: Tensor | None = None
        if isinstance(normaliser, Tensor):  # stays on the device: reading it would wait
            self._inverse_normaliser = normaliser.detach().reshape(1).to(device).double().reciprocal().float()
        else:
            inverse = 1.0 / normaliser
        self._tokens = c_tokens(tokens, logprobs, entropy, self.coefficient, self.entropy_coefficient, self._sums)
        self._objective = c_objective(tokens.objective, inverse)

    def evaluate(self, rows: Rows) -> None:
        num_agents = self._held[0].num_agents
        scratch = torch.empty(
            cuda_library().marsrl_cuda_policy_scratch(rows.count, num_agents),
            dtype=torch.float64,
            device=self.coefficient.device,
        )
        queue(
            "policy_terms",
            self.coefficient,
            ctypes.byref(self._objective),
            ctypes.byref(self._tokens),
            address(self._inverse_normaliser),
            address(self._held[0].mask),
            address(rows.ids),
            rows.first,
            rows.count,
            num_agents,
            scratch.data_ptr(),
        )

    def sums(self) -> Tensor:
        return self._sums
