"""Fused heads and losses of other projects: Liger, cut-cross-entropy, QuACK, verl."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from case import Missing
from torch import Tensor

from peers import CrossEntropyPeer, LogprobPeer, Peer, PolicyLossPeer, PolicyProblem, why_not_imported

NEEDS_CUDA = "its kernels are Triton or CUDA code, which needs a GPU"


def fused_peers(device: str) -> list[Peer | Missing]:
    """All of them, each callable or with the reason why not."""
    makers: dict[str, tuple[Callable[[], Peer], bool]] = {
        "Liger fused linear GRPO": (_liger_fused_grpo, False),
        "Liger grpo_loss (Triton)": (_liger_grpo_loss, True),
        "Liger fused linear CE, per token": (_liger_cross_entropy, True),
        "Liger fused linear CE, mean": (_liger_cross_entropy_mean, True),
        "cut-cross-entropy, per token": (_cut_cross_entropy, True),
        "cut-cross-entropy, mean": (_cut_cross_entropy_mean, True),
        "QuACK chunked CE, mean": (_quack, True),
        "verl linear_cross_entropy": (_verl, True),
    }
    found: list[Peer | Missing] = []
    for name, (make, needs_cuda) in makers.items():
        try:
            peer = make()
        except Exception as error:  # a broken peer must not end the benchmark; its reason is printed
            found.append(Missing(name, why_not_imported(error)))
            continue
        assert peer.name == name, (peer.name, name)
        found.append(Missing(name, NEEDS_CUDA) if needs_cuda and device != "cuda" else peer)
    return found


def _liger_fused_grpo() -> Peer:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def prepared(problem: PolicyProblem) -> Callable[[], Tensor]:
        is_cuda = problem.hidden.is_cuda
        # "dapo": divided by the tokens of the mask; beta 0: no KL, no reference model
        module = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=is_cuda, use_ref_model=False, chunk_size=1, epsilon_low=problem.clip,
            epsilon_high=problem.clip, loss_type="dapo", temperature=1.0,
        )  # fmt: skip
        rows = (problem.num_sequences, -1)
        mask = _mask_of(problem).view(rows).float()
        targets, old = problem.targets.view(rows), problem.old_logprobs.view(rows)

        def call() -> Tensor:
            hidden = problem.hidden.view(*rows, problem.hidden.shape[1])
            loss, _ = module(hidden, problem.weight, targets, mask, problem.advantages, old_per_token_logps=old)
            return loss

        return call

    return PolicyLossPeer("Liger fused linear GRPO", prepared)


def _liger_grpo_loss() -> Peer:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def prepared(problem: PolicyProblem) -> Callable[[], Tensor]:
        rows = (problem.num_sequences, -1)
        mask = _mask_of(problem).view(rows).float().contiguous()
        targets, old = problem.targets.view(rows).contiguous(), problem.old_logprobs.view(rows).contiguous()
        width = problem.hidden.shape[1]

        def call() -> Tensor:
            hidden = problem.hidden.view(*rows, width)
            # it takes [B, L + 1, V] and ignores the last position, as a model's output has it
            padded = torch.cat([hidden, hidden.new_zeros(hidden.shape[0], 1, width)], 1)
            loss, _ = triton_grpo_loss(
                F.linear(padded, problem.weight), old, None, targets, problem.advantages, completion_mask=mask,
                temperature=1.0, beta=0.0, eps_low=problem.clip, eps_high=problem.clip, inplace=True,
                loss_type="dapo", reduce=True,
            )  # fmt: skip
            return loss

        return call

    return PolicyLossPeer("Liger grpo_loss (Triton)", prepared)


def _mask_of(problem: PolicyProblem) -> Tensor:
    if problem.mask is not None:
        return problem.mask
    return torch.ones_like(problem.targets, dtype=torch.bool)


def _liger_cross_entropy() -> Peer:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(reduction="none")  # recomputes in backward, with each token's gradient
    return LogprobPeer("Liger fused linear CE, per token", lambda x, w, y: (-module(w, x, y).float(), None))


def _liger_cross_entropy_mean() -> Peer:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(reduction="mean")
    return CrossEntropyPeer("Liger fused linear CE, mean", lambda x, w, y: module(w, x, y))


def _cut_cross_entropy() -> Peer:
    from cut_cross_entropy import linear_cross_entropy

    return LogprobPeer(
        "cut-cross-entropy, per token",
        lambda x, w, y: (-linear_cross_entropy(x, w, y, reduction="none").float(), None),
    )


def _cut_cross_entropy_mean() -> Peer:
    from cut_cross_entropy import linear_cross_entropy

    return CrossEntropyPeer("cut-cross-entropy, mean", lambda x, w, y: linear_cross_entropy(x, w, y))


def _quack() -> Peer:
    if importlib.util.find_spec("cutlass") is None:
        packed = importlib.util.find_spec("nvidia_cutlass_dsl")
        if packed is not None and packed.submodule_search_locations:  # its .pth file is not read from PYTHONPATH
            sys.path.append(str(Path(next(iter(packed.submodule_search_locations))) / "dsl_packages"))
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=4096, reduction="mean")

    return CrossEntropyPeer("QuACK chunked CE, mean", call)


def _verl() -> Peer:
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

    takes_temperature = "temperature" in inspect.signature(LinearCrossEntropy.forward).parameters
    rest = (1.0, "none") if takes_temperature else ("none",)

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = LinearCrossEntropy.apply(hidden, weight, targets, *rest)
        return logprobs, entropy

    return LogprobPeer("verl linear_cross_entropy", call, has_entropy_gradient=True)
