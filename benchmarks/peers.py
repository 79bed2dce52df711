"""Fused heads and losses of PyTorch and other projects, each with a way to call it or the reason why it is missing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from case import Missing
from head_problem import HeadInputs, LogprobFunction
from torch import Tensor

NEEDS_CUDA = "its kernels are Triton or CUDA code, which needs a GPU"
NO_ENTROPY = "no entropy"


@dataclass(frozen=True)
class LogprobPeer:
    """Peer that returns log-probs. does: remark in the table, such as what the peer leaves out."""

    name: str
    call: LogprobFunction
    does: str = ""


@dataclass(frozen=True)
class LossPeer:
    """Peer that computes a loss. prepared(inputs, clip): computes constants once, and returns a differentiable function.

    is_ours: True if it is the same clipped loss over the mask as ours; False: another loss, whose results
    are not compared.
    """

    name: str
    prepared: Callable[[HeadInputs, float], Callable[[], Tensor]]
    is_ours: bool = True


Peer = LogprobPeer | LossPeer


def flash_attn(name: str) -> Callable[..., Tensor] | str:
    """Return the function of this name from flash-attn, or the reason why it is missing."""
    if importlib.util.find_spec("flash_attn") is None:
        return "ModuleNotFoundError: No module named 'flash_attn'"
    try:
        function: Callable[..., Tensor] = getattr(importlib.import_module("flash_attn"), name)
    except Exception as error:  # a compiled extension may not fit this torch
        return why_not_imported(error)
    return function


def why_not_imported(error: Exception) -> str:
    """Return the error as the one-line reason in the table."""
    text = str(error).strip()
    first = text.splitlines()[0][:160] if text else ""
    return f"{type(error).__name__}: {first}"


def fused_peers(device: str) -> list[Peer | Missing]:
    """Return all peers; those that cannot run have a reason."""
    makers: dict[str, tuple[Callable[[], Peer], bool]] = {
        "torch F.linear_cross_entropy": (_torch_linear_cross_entropy, False),
        "Liger fused linear GRPO": (_liger_fused_grpo, False),
        "Liger grpo_loss (Triton)": (_liger_grpo_loss, True),
        "Liger fused linear CE, per token": (_liger_cross_entropy, True),
        "Liger fused linear scaled CE": (_liger_scaled_cross_entropy, False),
        "cut-cross-entropy, per token": (_cut_cross_entropy, True),
        "QuACK chunked CE, mean": (_quack, True),
        "verl linear_cross_entropy": (_verl, True),
    }
    peers: list[Peer | Missing] = []
    if importlib.util.find_spec("cutlass") is None:
        packed = importlib.util.find_spec("nvidia_cutlass_dsl")
        if packed is not None and packed.submodule_search_locations:  # Python reads no .pth file from PYTHONPATH
            sys.path.append(str(Path(next(iter(packed.submodule_search_locations))) / "dsl_packages"))
    for name, (make, needs_cuda) in makers.items():
        try:
            peer = make()
        except Exception as error:  # a broken peer must not end the benchmark; its reason is printed
            peers.append(Missing(name, why_not_imported(error)))
            continue
        assert peer.name == name, (peer.name, name)
        peers.append(Missing(name, NEEDS_CUDA) if needs_cuda and device != "cuda" else peer)
    return peers


def _torch_linear_cross_entropy() -> Peer:
    """Return torch's function (torch >= 2.13). With reduction="none" its results have the input's dtype, bfloat16."""
    options = torch.nn.LinearCrossEntropyOptions()

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return -F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options).float(), None

    return LogprobPeer("torch F.linear_cross_entropy", call, NO_ENTROPY)


def _liger_fused_grpo() -> Peer:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def prepared(inputs: HeadInputs, clip: float) -> Callable[[], Tensor]:
        # With "dapo" the loss is divided by the number of tokens in the mask; beta 0 means no KL and no reference model.
        module = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=inputs.hidden.is_cuda, use_ref_model=False, chunk_size=1, epsilon_low=clip,
            epsilon_high=clip, loss_type="dapo", temperature=1.0,
        )  # fmt: skip
        mask, targets, old = _by_sequence(inputs)

        def call() -> Tensor:
            hidden = inputs.hidden.view(*mask.shape, -1)
            loss, _ = module(hidden, inputs.weight, targets, mask, inputs.advantages, old_per_token_logps=old)
            return loss

        return call

    return LossPeer("Liger fused linear GRPO", prepared)


def _liger_grpo_loss() -> Peer:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def prepared(inputs: HeadInputs, clip: float) -> Callable[[], Tensor]:
        mask, targets, old = _by_sequence(inputs)

        def call() -> Tensor:
            hidden = inputs.hidden.view(*mask.shape, -1)
            # The loss takes [B, L + 1, V], as a model returns it, and ignores the last position.
            logits = F.linear(F.pad(hidden, (0, 0, 0, 1)), inputs.weight)
            loss, _ = triton_grpo_loss(
                logits, old, None, targets, inputs.advantages, completion_mask=mask, temperature=1.0, beta=0.0,
                eps_low=clip, eps_high=clip, inplace=True, loss_type="dapo", reduce=True,
            )  # fmt: skip
            return loss

        return call

    return LossPeer("Liger grpo_loss (Triton)", prepared)


def _by_sequence(inputs: HeadInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return mask (float32), targets and old log-probs, each [S, L]; the sequences must be equally long."""
    mask = torch.ones_like(inputs.old_logprobs) if inputs.mask is None else inputs.mask.float()
    mask, targets, old = (
        tensor.view(inputs.advantages.numel(), -1) for tensor in (mask, inputs.targets, inputs.old_logprobs)
    )
    return mask, targets, old


def _liger_cross_entropy() -> Peer:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(reduction="none")  # recomputes logits in the backward
    name = "Liger fused linear CE, per token"
    return LogprobPeer(name, lambda x, w, y: (-module(w, x, y).float(), None), NO_ENTROPY)


def _liger_scaled_cross_entropy() -> Peer:
    """Return Liger's head for RL, with temperature and entropy.

    On Hopper it is a CuTe kernel, which needs nvidia-cutlass-dsl; on other devices it is PyTorch, with 512 rows at a time.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if is_hopper:  # The function would import its kernel only when it is called.
        importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        call_options = {"temperature": 1.0, "return_entropy": True}
        nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, **call_options)
        return -nll, entropy

    return LogprobPeer("Liger fused linear scaled CE", call, "" if is_hopper else "PyTorch in chunks")


def _cut_cross_entropy() -> Peer:
    from cut_cross_entropy import linear_cross_entropy

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return -linear_cross_entropy(hidden, weight, targets, reduction="none").float(), None

    return LogprobPeer("cut-cross-entropy, per token", call, NO_ENTROPY)


def _quack() -> Peer:
    """Return QuACK's mean cross entropy. It computes no token weights, ratio or entropy, so it is cheaper by design."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def prepared(inputs: HeadInputs, clip: float) -> Callable[[], Tensor]:
        tensors = inputs.hidden, inputs.weight, inputs.targets
        return partial(chunked_linear_cross_entropy, *tensors, chunk_size=4096, reduction="mean")

    return LossPeer("QuACK chunked CE, mean", prepared, is_ours=False)


def _verl() -> Peer:
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

    takes_temperature = "temperature" in inspect.signature(LinearCrossEntropy.forward).parameters
    trailing = (1.0, "none") if takes_temperature else ("none",)

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = LinearCrossEntropy.apply(hidden, weight, targets, *trailing)
        return logprobs, entropy

    return LogprobPeer("verl linear_cross_entropy", call)
