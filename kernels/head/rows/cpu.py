"""Row kernels of csrc/cpu for whole rows and for vocabulary tiles, parallel over rows.

Gradients overwrite the logits, except where a tile's gradients are computed from stored exponentials.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.head.objective import METRICS, PolicyObjective, PolicyTokens
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels, Slopes, Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.library import address

KINDS = {"clip": 0, "cispo": 1}
CORRECTIONS = {"none": 0, "tis": 1, "icepop": 2, "sequence_mask": 2}  # sequence_mask: icepop on the sequence's drift
KLS = {"none": 0, "k1": 1, "k2": 2, "k3": 3}


def c_rows(logits: Tensor, rows: Rows, head: Head) -> tuple[Any, ...]:
    """Return the first arguments of the C row functions, which describe the logits and their targets.

    Rows of logits are head.width elements apart.
    """
    return logits, head.width, rows.count, head.num_columns, rows.ids, rows.first, head.targets


def c_temperature(head: Head) -> tuple[Tensor | None, float]:
    """Return the C functions' inverse temperatures: [T] or None, and the one to use if that is None."""
    return head.inverse_temperature, head.inverse_temperature_of_all


class CpuRowKernels(RowKernels):
    """RowKernels through ctypes; every call is complete when it returns."""

    is_host = True

    def statistics(self, product: Tensor, rows: Rows, head: Head, out: Statistics) -> None:
        bad = library.cpu_library().marsrl_row_logprobs(
            *c_rows(product, rows, head), *c_temperature(head), *out.arrays, torch.get_num_threads()
        )
        assert bad < 0, f"target of token {bad} is out of range, but passed the check"

    def partials(self, product: Tensor, rows: Rows, head: Head) -> Tensor:
        partials = torch.empty(4, rows.count, dtype=torch.float64, device="cpu")
        self.exponentials(product, head, rows.take(head.targets), head.inverse_temperature_at(rows), partials, None)
        return partials

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        return CpuPolicyTerms(tokens, logprobs, entropy)

    def gradients(
        self, product: Tensor, rows: Rows, head: Head, slopes: Slopes, out: Tensor, active: Tensor
    ) -> LateCount:
        _check_place(product, out)
        num_active = library.cpu_library().marsrl_row_gradients(
            *c_rows(product, rows, head),
            head.first_column,
            *c_temperature(head),
            *slopes.arrays,
            active,
            torch.get_num_threads(),
        )
        return LateCount(num_active)

    def exponentials(
        self,
        logits: Tensor,
        head: Head,
        targets: Tensor,
        inverse_temperature: Tensor,
        partials: Tensor,
        out: Tensor | None,
    ) -> None:
        """Compute the statistics and exponentials e^d of a vocabulary tile.

        logits: [R, columns] float32, row-major.
        head: Head.tile of these columns.
        targets, inverse_temperature: [R], of these rows.
        partials: [4, R] float64, receives the statistics that RowKernels.partials defines.
        out: [R, columns] bfloat16, receives e^d, and 0 in padding columns; rows may be strided. None: exponentials are not
            stored.
        """
        library.cpu_library().marsrl_row_partials(
            *(logits, head.width, logits.shape[0], head.num_columns, targets - head.first_column, inverse_temperature),
            *(partials, out, 0 if out is None else out.stride(0), torch.get_num_threads()),
        )

    def exponential_gradients(
        self,
        exponentials: Tensor,
        maxima: Tensor,
        kept: Tensor,
        tokens: Tensor,
        head: Head,
        slopes: Slopes,
        out: Tensor,
    ) -> None:
        """Compute dz (RowKernels.gradients) of some rows of a vocabulary tile from their exponentials.

        exponentials: [R, columns] bfloat16, as written by the method `exponentials`.
        maxima: [R] float64, the first row of the tile's partials.
        kept: [n] int64, the rows to compute. tokens: [n] int64, the tokens of these rows.
        out: [n, columns] float32, receives dz. The target's dz is computed from the float32 statistics in `slopes`.
        """
        library.cpu_library().marsrl_exponential_gradients(
            *(exponentials, exponentials.stride(0), maxima, kept, tokens, kept.numel()),
            *(head.num_columns, head.targets, head.first_column, *c_temperature(head)),
            *slopes.arrays,
            *(out, out.shape[1], torch.get_num_threads()),
        )


class CpuPolicyTerms:
    """PolicyTerms by csrc/cpu, with sums in float64."""

    def __init__(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor):
        self.coefficient, self.entropy_coefficient = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        self._sums = torch.zeros(tokens.num_agents, len(METRICS), dtype=torch.float64, device="cpu")
        self._held = tokens, logprobs, entropy  # keeps the tensors alive whose addresses are in the structures
        self._tokens = c_tokens(tokens, logprobs, entropy, self.coefficient, self.entropy_coefficient, self._sums)
        self._objective = c_objective(tokens.objective, 1.0 / float(tokens.normaliser))

    def evaluate(self, rows: Rows) -> None:
        library.cpu_library().marsrl_policy_terms(
            *self._structures(), self._held[0].mask, rows.ids, rows.first, rows.count
        )

    def in_one_walk(
        self, logits: Tensor, rows: Rows, head: Head, statistics: Statistics, out: Tensor, active: Tensor
    ) -> LateCount:
        """Compute statistics, objective and gradients in one pass over each row.

        One rank must have the whole vocabulary.

        statistics.logprobs and statistics.entropy must be the arrays that were passed to RowKernels.policy_terms.
        """
        assert statistics.logprobs.data_ptr() == self._held[1].data_ptr(), "the terms were created for other log-probs"
        _check_place(logits, out)
        num_active = library.cpu_library().marsrl_policy_rows(
            *c_rows(logits, rows, head),
            *c_temperature(head),
            *statistics.arrays,
            *self._structures(),
            active,
            torch.get_num_threads(),
        )
        assert num_active >= 0, f"target of token {-1 - num_active} is out of range, but passed the check"
        return LateCount(num_active)

    def sums(self) -> Tensor:
        return self._sums

    def _structures(self) -> tuple[Any, Any]:
        return ctypes.byref(self._objective), ctypes.byref(self._tokens)


def _check_place(logits: Tensor, out: Tensor) -> None:
    """Assert that the gradients overwrite the logits, as csrc/cpu requires."""
    assert out.dtype == torch.float32, f"gradients are {out.dtype}"
    assert out.data_ptr() == logits.data_ptr(), "gradients on the CPU take the place of the logits"


def c_tokens(tokens: PolicyTokens, *arrays: Tensor) -> library.Tokens:
    """Return a struct with the addresses of the inputs and of `arrays` (log-probs, entropies, outputs).

    The caller must keep these tensors alive.
    """
    t = tokens
    inputs = (
        *(t.advantages, t.log_ratio, t.log_drift, t.old_logprobs, t.rollout_logprobs, t.reference_logprobs),
        *(t.gate, t.dropped, t.weights, t.agent_of),
    )
    return library.Tokens(*map(address, (*inputs, *arrays)))


def c_objective(objective: PolicyObjective, inverse_normaliser: float) -> library.Objective:
    """Return the options as the struct that the functions in csrc read."""
    kinds = KINDS[objective.kind], CORRECTIONS[objective.correction], KLS[objective.kl]
    return library.Objective(objective.options, inverse_normaliser, *kinds)
