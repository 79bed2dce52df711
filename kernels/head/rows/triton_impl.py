"""The row kernels in Triton: how triton_kernels.py is launched."""

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from marsrl.kernels.head.objective import METRICS, PolicyTokens
from marsrl.kernels.head.rows import triton_kernels, triton_launches
from marsrl.kernels.head.rows.protocol import PolicyTerms
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.rows.triton_launches import (
    BLOCK_COLUMNS,
    NUM_WARPS,
    PIECE_COLUMNS,
    list_active,
    put_statistics,
    shard_partials,
    token_arguments,
    with_padding,
)
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import on_device_of

if TYPE_CHECKING:
    from marsrl.kernels.head.first_gemm.triton_impl import TritonFirstGemm


class TritonRowKernels:
    """RowKernels on the current stream of the tensors' device; the host never waits here.

    first_gemm: a first product of our own in place of that of gemms.py.
    """

    is_host = False
    tiles = None

    def __init__(self, first_gemm: "TritonFirstGemm | None" = None):
        self.first_gemm = first_gemm

    def statistics(self, logits: Tensor, rows: Rows, head: Head, out: Statistics) -> None:
        put_statistics(self._pieces(logits, rows, head), rows, head, out)

    def partials(self, logits: Tensor, rows: Rows, head: Head) -> Tensor:
        return shard_partials(self._pieces(logits, rows, head), rows, head)

    def _pieces(self, logits: Tensor, rows: Rows, head: Head) -> Tensor:
        """[4, pieces, R] float32: the rows in pieces of PIECE_COLUMNS."""
        pieces = triton.cdiv(head.width, PIECE_COLUMNS)
        partials = torch.empty(4, pieces, rows.count, dtype=torch.float32, device=logits.device)
        with on_device_of(logits):
            triton_kernels.row_partials[(rows.count, pieces)](
                with_padding(logits),
                logits.stride(0),
                rows.count,
                head.num_columns,
                *token_arguments(rows, head),
                partials,
                PIECE=PIECE_COLUMNS,
                BLOCK=_block(head.width),
                num_warps=NUM_WARPS,
            )
        return partials

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        return TritonPolicyTerms(tokens, logprobs, entropy)

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
        with on_device_of(logits):
            place_of, late = list_active(rows, coefficient, entropy_coefficient, active)
            triton_kernels.row_gradients[(rows.count, triton.cdiv(head.width, PIECE_COLUMNS))](
                with_padding(logits),
                logits.stride(0),
                head.num_columns,
                *token_arguments(rows, head),
                statistics.logprobs,
                statistics.entropy,
                statistics.maximum,
                statistics.log_sum,
                coefficient,
                entropy_coefficient,
                place_of,
                with_padding(out),
                out.stride(0),
                PIECE=PIECE_COLUMNS,
                BLOCK=_block(head.width),
                num_warps=NUM_WARPS,
            )
        return late


class TritonPolicyTerms:
    """PolicyTerms with the sums of each block of tokens kept apart until they are asked for: no atomics."""

    in_one_walk = None

    def __init__(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor):
        self._tokens, self._logprobs, self._entropy = tokens, logprobs, entropy
        self.coefficient, self.entropy_coefficient = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        self._sums: list[Tensor] = []  # [programs, A, 6] float64 of each call
        normaliser, device = tokens.normaliser, logprobs.device
        if isinstance(normaliser, Tensor) and normaliser.device == device:
            self._inverse_normaliser = normaliser.detach().reshape(1).float().reciprocal()
        else:
            inverse = 1.0 / float(normaliser)
            self._inverse_normaliser = torch.full((1,), inverse, dtype=torch.float32, device=device)

    def evaluate(self, rows: Rows) -> None:
        if rows.count == 0:
            return
        tokens, objective = self._tokens, self._tokens.objective
        programs = triton.cdiv(rows.count, triton_launches.BLOCK_TOKENS)
        shape = (programs, tokens.num_agents, len(METRICS))
        sums = torch.empty(shape, dtype=torch.float64, device=self._logprobs.device)
        self._sums.append(sums)
        with on_device_of(self._logprobs):
            triton_kernels.policy_terms[(programs,)](
                rows.count,
                rows.ids,
                rows.first,
                tokens.advantages,
                tokens.log_ratio,
                tokens.log_drift,
                tokens.old_logprobs,
                tokens.rollout_logprobs,
                tokens.reference_logprobs,
                _bytes(tokens.gate),
                _bytes(tokens.dropped),
                _bytes(tokens.mask),
                tokens.agent_of,
                tokens.weights,
                self._logprobs,
                self._entropy,
                self._inverse_normaliser,
                self.coefficient,
                self.entropy_coefficient,
                sums,
                tokens.num_agents,
                objective.clip_low,
                objective.clip_high,
                objective.dual_clip or 0.0,
                objective.correction_low,
                objective.correction_high,
                objective.kl_coef,
                objective.entropy_coef,
                2.0 if objective.mpt_probability is None else objective.mpt_probability,
                KIND=objective.kind,
                CORRECTION=objective.correction,
                KL=objective.kl,
                HAS_DUAL_CLIP=objective.dual_clip is not None,
                HAS_ENTROPY=objective.entropy_coef != 0.0,
                BLOCK=triton_launches.BLOCK_TOKENS,
            )

    def sums(self) -> Tensor:
        if not self._sums:
            shape = (self._tokens.num_agents, len(METRICS))
            return torch.zeros(shape, dtype=torch.float64, device=self._logprobs.device)
        return torch.cat(self._sums).sum(0)


def _block(width: int) -> int:
    """Columns of one step: no more than the row has, so that small vocabularies leave no lanes idle."""
    return min(BLOCK_COLUMNS, max(128, triton.next_power_of_2(width)))


def _bytes(flags: Tensor | None) -> Tensor | None:
    """bool as the bytes that it is."""
    return None if flags is None else flags.contiguous().view(torch.uint8)
