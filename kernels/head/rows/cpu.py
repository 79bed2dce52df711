"""The row kernels of csrc/cpu: float32 logits to gradients in their place; threads over rows."""

import ctypes

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.head.objective import METRICS, PolicyObjective, PolicyTokens
from marsrl.kernels.head.rows.cpu_calls import c_rows, c_statistics, c_temperature
from marsrl.kernels.head.rows.cpu_tiles import CpuTileKernels
from marsrl.kernels.head.rows.protocol import PolicyTerms
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.library import address

KINDS = {"clip": 0, "cispo": 1}
CORRECTIONS = {"none": 0, "tis": 1, "icepop": 2, "sequence_mask": 2}  # icepop of the sequence's drift
KLS = {"none": 0, "k1": 1, "k2": 2, "k3": 3}


class CpuRowKernels:
    """RowKernels through ctypes; every call is complete when it returns."""

    is_host = True
    first_gemm = None

    @property
    def tiles(self) -> CpuTileKernels:
        return CpuTileKernels()

    def statistics(self, logits: Tensor, rows: Rows, head: Head, out: Statistics) -> None:
        bad = library.cpu_library().marsrl_row_logprobs(
            *c_rows(logits, head.width, rows, head),
            *c_temperature(head),
            *c_statistics(out),
            torch.get_num_threads(),
        )
        assert bad < 0, f"target of token {bad} is out of range, and no check saw it"

    def partials(self, logits: Tensor, rows: Rows, head: Head) -> Tensor:
        local = rows.take(head.targets) - head.first_column
        inverse = head.inverse_temperature_at(rows)
        partials = torch.empty(4, rows.count, dtype=torch.float64, device="cpu")
        library.cpu_library().marsrl_row_partials(
            logits.data_ptr(),
            head.width,
            rows.count,
            head.num_columns,
            local.data_ptr(),
            inverse.data_ptr(),
            partials.data_ptr(),
            None,
            0,
            torch.get_num_threads(),
        )
        return partials

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        return CpuPolicyTerms(tokens, logprobs, entropy)

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
        _check_place(logits, out)
        assert active is not None, "a host has nothing to wait for: rows without a coefficient are left out"
        kept = library.cpu_library().marsrl_row_gradients(
            *c_rows(logits, head.width, rows, head),
            head.first_column,
            *c_temperature(head),
            *c_statistics(statistics),
            coefficient.data_ptr(),
            entropy_coefficient.data_ptr(),
            active.data_ptr(),
            torch.get_num_threads(),
        )
        return LateCount(kept)


class CpuPolicyTerms:
    """PolicyTerms in one pass over the tokens listed, sums in double."""

    def __init__(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor):
        self.coefficient, self.entropy_coefficient = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        self._sums = torch.zeros(tokens.num_agents, len(METRICS), dtype=torch.float64, device="cpu")
        self._held = tokens, logprobs, entropy  # the structures hold addresses only
        self._tokens = c_tokens(tokens, logprobs, entropy, self.coefficient, self.entropy_coefficient, self._sums)
        self._objective = c_objective(tokens.objective, 1.0 / float(tokens.normaliser))
        self._evaluate = library.cpu_library().marsrl_policy_terms

    def evaluate(self, rows: Rows) -> None:
        self._evaluate(
            ctypes.byref(self._objective),
            ctypes.byref(self._tokens),
            address(self._held[0].mask),
            address(rows.ids),
            rows.first,
            rows.count,
        )

    def in_one_walk(
        self, logits: Tensor, rows: Rows, head: Head, statistics: Statistics, out: Tensor, active: Tensor
    ) -> LateCount:
        """For a vocabulary on one rank; statistics.logprobs and .entropy are the arrays of RowKernels.policy_terms."""
        assert statistics.logprobs.data_ptr() == self._held[1].data_ptr(), "terms of other log-probs"
        _check_place(logits, out)
        kept = library.cpu_library().marsrl_policy_rows(
            *c_rows(logits, head.width, rows, head),
            *c_temperature(head),
            *c_statistics(statistics),
            ctypes.byref(self._objective),
            ctypes.byref(self._tokens),
            active.data_ptr(),
            torch.get_num_threads(),
        )
        assert kept >= 0, f"target of token {-1 - kept} is out of range, and no check saw it"
        return LateCount(kept)

    def sums(self) -> Tensor:
        return self._sums


def _check_place(logits: Tensor, out: Tensor) -> None:
    """csrc/cpu turns logits into gradients where they lie."""
    assert out.dtype == torch.float32, f"gradients are {out.dtype}"
    assert out.data_ptr() == logits.data_ptr(), "gradients on the CPU take the place of the logits"


def c_tokens(
    tokens: PolicyTokens,
    logprobs: Tensor,
    entropy: Tensor,
    coefficient: Tensor,
    entropy_coefficient: Tensor,
    sums: Tensor,
) -> library.Tokens:
    """The addresses of the inputs and of the outputs; whoever holds it keeps these tensors alive."""
    return library.Tokens(
        tokens.advantages.data_ptr(),
        address(tokens.log_ratio),
        address(tokens.log_drift),
        address(tokens.old_logprobs),
        address(tokens.rollout_logprobs),
        address(tokens.reference_logprobs),
        address(tokens.gate),
        address(tokens.dropped),
        address(tokens.weights),
        address(tokens.agent_of),
        logprobs.data_ptr(),
        entropy.data_ptr(),
        coefficient.data_ptr(),
        entropy_coefficient.data_ptr(),
        sums.data_ptr(),
    )


def c_objective(objective: PolicyObjective, inverse_normaliser: float) -> library.Objective:
    """The options as csrc reads them."""
    return library.Objective(
        objective.clip_low,
        objective.clip_high,
        objective.dual_clip or 0.0,
        objective.correction_low,
        objective.correction_high,
        objective.kl_coef,
        objective.entropy_coef,
        2.0 if objective.mpt_probability is None else objective.mpt_probability,
        inverse_normaliser,
        KINDS[objective.kind],
        CORRECTIONS[objective.correction],
        KLS[objective.kl],
    )
