"""Launches of the row kernels in triton_kernels.py."""

import torch
import triton
from torch import Tensor

from marsrl.kernels.head.objective import METRICS, PolicyTokens
from marsrl.kernels.head.rows import triton_kernels
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels, Slopes, Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import on_device_of

# Columns of a row that one program reads, called a piece. 151936 columns are 5 pieces, so that even 15 rows keep 75
# multiprocessors busy. A piece (128 KiB) is long enough to run at memory bandwidth. Not measured yet.
PIECE_COLUMNS = 32768
BLOCK_COLUMNS = 4096  # columns per step of the loop: 16 elements per thread
NUM_WARPS = 8
JOIN_ELEMENTS = 256  # rows x pieces that a program of finish_rows or join_pieces reads per step
JOIN_PIECES = 32  # most pieces per step
BLOCK_TOKENS = 1024  # tokens per program of policy_terms, and per step of list_active


class TritonRowKernels(RowKernels):
    """RowKernels on the current stream of the tensors' device, without synchronisation."""

    is_host = False

    def statistics(self, product: Tensor, rows: Rows, head: Head, out: Statistics) -> None:
        pieces = _pieces(product, rows, head)
        block = _join_block(pieces)
        with on_device_of(pieces):
            triton_kernels.finish_rows[(triton.cdiv(rows.count, block["BLOCK"]),)](
                *(pieces, pieces.shape[1], pieces.shape[2], rows.count, head.num_columns, rows.ids, rows.first),
                *(head.targets, head.inverse_temperature, head.inverse_temperature_of_all, out.arrays),
                **block,
            )

    def partials(self, product: Tensor, rows: Rows, head: Head) -> Tensor:
        pieces = _pieces(product, rows, head)
        block = _join_block(pieces)
        out = torch.empty(4, rows.count, dtype=torch.float64, device=pieces.device)
        with on_device_of(pieces):
            triton_kernels.join_pieces[(triton.cdiv(rows.count, block["BLOCK"]),)](
                *(pieces, pieces.shape[1], pieces.shape[2], rows.count, rows.ids, rows.first),
                *(head.inverse_temperature, head.inverse_temperature_of_all, out),
                **block,
            )
        return out

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        return TritonPolicyTerms(tokens, logprobs, entropy)

    def gradients(
        self, product: Tensor, rows: Rows, head: Head, slopes: Slopes, out: Tensor, active: Tensor
    ) -> LateCount:
        place_of, late = list_active(rows, slopes, active)
        with on_device_of(product):
            triton_kernels.row_gradients[(rows.count, triton.cdiv(head.width, PIECE_COLUMNS))](
                *(_with_padding(product), product.stride(0), head.num_columns),
                *_token_arguments(rows, head),
                *(slopes.arrays, place_of, _with_padding(out), out.stride(0)),
                **_pieces_of_rows(head.width),
            )
        return late


class TritonPolicyTerms:
    """PolicyTerms without atomics.

    The kernel stores separate sums for each block of tokens, and the method `sums` adds them.
    """

    in_one_walk = None

    def __init__(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor):
        self._tokens, self._logprobs, self._entropy = tokens, logprobs, entropy
        self.coefficient, self.entropy_coefficient = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        self._sums: list[Tensor] = []  # one [programs, A, len(METRICS)] float64 per call of evaluate
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
        programs = triton.cdiv(rows.count, BLOCK_TOKENS)
        shape = (programs, tokens.num_agents, len(METRICS))
        sums = torch.empty(shape, dtype=torch.float64, device=self._logprobs.device)
        self._sums.append(sums)
        with on_device_of(self._logprobs):
            triton_kernels.policy_terms[(programs,)](
                *(rows.count, rows.ids, rows.first, _inputs(tokens), self._logprobs, self._entropy),
                *(self._inverse_normaliser, self.coefficient, self.entropy_coefficient, sums, tokens.num_agents),
                objective.options,
                KIND=objective.kind,
                CORRECTION=objective.correction,
                KL=objective.kl,
                HAS_DUAL_CLIP=objective.dual_clip is not None,
                HAS_ENTROPY=objective.entropy_coef != 0.0,
                BLOCK=BLOCK_TOKENS,
            )

    def sums(self) -> Tensor:
        if not self._sums:
            shape = (self._tokens.num_agents, len(METRICS))
            return torch.zeros(shape, dtype=torch.float64, device=self._logprobs.device)
        return torch.cat(self._sums).sum(0)


def list_active(rows: Rows, slopes: Slopes, active: Tensor) -> tuple[Tensor, LateCount]:
    """Number the active rows, and write their tokens to active [>= R] int64.

    Returns place_of [R] int32, each row's index among the active rows or -1, and the number of active rows.
    """
    place_of = torch.empty(rows.count, dtype=torch.int32, device=active.device)
    count = torch.empty(1, dtype=torch.int32, device=active.device)
    with on_device_of(active):
        triton_kernels.list_active[(1,)](
            *(rows.count, rows.ids, rows.first, slopes.coefficient, slopes.entropy_coefficient),
            *(place_of, active, count),
            BLOCK=BLOCK_TOKENS,
        )
        return place_of, LateCount(count)  # queues the copy ahead of later work, so that the host gets the count early


def _pieces(logits: Tensor, rows: Rows, head: Head) -> Tensor:
    """Return the partial statistics of each piece of the rows, [4, pieces, R] float32."""
    pieces = triton.cdiv(head.width, PIECE_COLUMNS)
    partials = torch.empty(4, pieces, rows.count, dtype=torch.float32, device=logits.device)
    with on_device_of(logits):
        triton_kernels.row_partials[(rows.count, pieces)](
            *(_with_padding(logits), logits.stride(0), rows.count, head.num_columns),
            *_token_arguments(rows, head),
            partials,
            **_pieces_of_rows(head.width),
        )
    return partials


def _token_arguments(rows: Rows, head: Head) -> tuple[Tensor | int | float | None, ...]:
    """Return the kernel arguments that describe rows: ids, first, targets, first_column, inverse temperatures."""
    return (
        rows.ids,
        rows.first,
        head.targets,
        head.first_column,
        head.inverse_temperature,
        head.inverse_temperature_of_all,
    )


def _join_block(pieces: Tensor) -> dict[str, int]:
    """Return the block sizes of finish_rows and join_pieces: rows, and pieces per step.

    The fewer pieces a row has, the more rows a program takes. It takes at least 8, whose float32 partials fill a 32-byte sector
    of memory; 768 rows then take 96 programs.
    """
    at_once = min(JOIN_PIECES, triton.next_power_of_2(max(1, pieces.shape[1])))
    return {"BLOCK": JOIN_ELEMENTS // at_once, "BLOCK_PIECES": at_once}


def _with_padding(rows: Tensor) -> Tensor:
    """Return a view [R, stride] of the rows [R, V] that includes their padding."""
    return rows.as_strided((rows.shape[0], rows.stride(0)), (rows.stride(0), 1))


def _pieces_of_rows(width: int) -> dict[str, int]:
    """Return the launch options of kernels over pieces.

    BLOCK is smaller for short rows, so that few lanes are idle.
    """
    block = min(BLOCK_COLUMNS, max(128, triton.next_power_of_2(width)))
    return {"PIECE": PIECE_COLUMNS, "BLOCK": block, "num_warps": NUM_WARPS}


def _inputs(tokens: PolicyTokens) -> tuple[Tensor | None, ...]:
    """Return the arrays of `tokens` in the order of policy_terms's `inputs`, with bools viewed as uint8."""
    t = tokens
    arrays = (
        *(t.advantages, t.log_ratio, t.log_drift, t.old_logprobs, t.rollout_logprobs, t.reference_logprobs),
        *(t.gate, t.dropped, t.weights, t.agent_of, t.mask),
    )
    return tuple(
        array.contiguous().view(torch.uint8) if array is not None and array.dtype == torch.bool else array
        for array in arrays
    )
