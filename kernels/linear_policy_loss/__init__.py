"""RL loss of an output head, and its gradients, without storing the logits of the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.differentiable import first_derivative_only
from marsrl.kernels.dispatch import Implementation, Op, late_function
from marsrl.kernels.head.bad_values import check_values
from marsrl.kernels.head.chunked_head import head_gradients, head_statistics, policy_gradients
from marsrl.kernels.head.gradients import HeadGradients, Wanted
from marsrl.kernels.head.objective import LossInputs, PolicyLoss, PolicyTokens
from marsrl.kernels.head.rows.protocol import RowKernels, Slopes, Statistics
from marsrl.kernels.head.rows.providers import ROW_PROVIDERS, RowProvider
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.support import Support
from marsrl.kernels.head.vocabulary import Head, make_head, why_not_reference_head
from marsrl.kernels.linear_policy_loss.quack_head import UnlikelyTarget, machine_lacks_quack, why_not_quack
from marsrl.kernels.linear_policy_loss.reference import linear_policy_loss_reference
from marsrl.kernels.main_grad import MainGrad, check_main_grad
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.terms import agent_sums, needs_whole_sequences, policy_terms, total_loss


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inputs: LossInputs,
    *,
    temperature: float | Tensor = 1.0,
    main_grad: Tensor | None = None,
    tp_group: Any = None,
    real_vocab_size: int | None = None,
    support: Support | None = None,
) -> PolicyLoss:
    """Compute the loss of inputs.objective for softmax(hidden @ weight.T / temperature).

    The forward also computes the gradients.

    A token-level objective has derivatives c = dL/dlog p and e = dL/dH that depend only on the token's own log-prob and entropy.
    Computing the logits once therefore gives the loss and all gradients:

        dz_v = [c (1[v = target] - p_v) - e p_v (log p_v + H)] / temperature,   dX = dz @ weight,   dW = dz.T @ hidden

    Logits are computed one chunk at a time, in float32. Rows outside the mask cost nothing; rows with c = e = 0 cost only their
    logits. Two kinds of objective compute the logits twice, because they first need the log-probs of whole sequences:
    sequence-level ratios with old_logprobs, and sequence_mask without old_logprobs.

    Args:
        hidden, weight, targets, temperature, tp_group, real_vocab_size, support: see linear_logprob. Targets are not read where
            the mask is off.
        inputs: the other inputs of the loss. For supervised training, pass the tokens' loss weights w as token_advantages and
            leave old_logprobs None: the gradient is then that of -sum_t w_t log p_t, divided by the normaliser.
        main_grad: [V, H] float32, Megatron's buffer of the weight's gradient. The backward adds dW to it; a forward never changes
            it, so discarded or recomputed forwards (activation checkpointing) are safe. Autograd then gets None as the gradient
            of weight. If the weight has Megatron's attribute `grad_added_to_main_grad`, it is set, and autograd gets a
            placeholder for Megatron's hooks instead.

    torch.compile breaks its graph at this op. A torch.library op can pass only tensors, numbers and strings to its backward. This
    op also passes a process group, main_grad, and gradients that the forward computed for a single backward.

    Returns:
        PolicyLoss. Only `.loss` is differentiable with respect to hidden and weight, and only once.

    Raises:
        ValueError: names the argument, what was found and what was expected.
        RuntimeError: no implementation can serve the call; the message has the reasons. Also raised if the process lets float32
            products round their operands (torch.set_float32_matmul_precision, allow_tf32) and this head needs full float32.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="linear_policy_loss computes its gradients in the forward, and writes main_grad")
    of_head = temperature, tp_group, real_vocab_size, support
    return _OP(_checked(hidden, weight, targets, inputs, main_grad, *of_head))


def served_by(hidden: Tensor, weight: Tensor, targets: Tensor, inputs: LossInputs) -> str:
    """Return the name of the implementation that linear_policy_loss would choose for these arguments."""
    return _OP.choose(_checked(hidden, weight, targets, inputs)).name


def _checked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inputs: LossInputs,
    main_grad: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    *of_head: Any,
) -> "_Call":
    head = make_head("linear_policy_loss", hidden, weight, targets, temperature, *of_head)
    if main_grad is not None:
        check_main_grad("linear_policy_loss", weight, main_grad)
    tokens = policy_tokens("linear_policy_loss", hidden.shape[0], hidden.device, inputs)
    temperature = check_values(head, temperature, inputs.mask)
    buffer = None if main_grad is None else MainGrad(weight, main_grad)
    return _Call(hidden, weight, head, temperature, tokens, buffer)


@dataclass(frozen=True)
class _Call:
    """Checked arguments of linear_policy_loss."""

    hidden: Tensor
    weight: Tensor
    head: Head
    temperature: float | Tensor
    tokens: PolicyTokens
    main_grad: MainGrad | None

    @property
    def wanted(self) -> Wanted:
        """The gradients to compute; none if grad mode is off.

        It is off in evaluation, and in a forward that will be recomputed.
        """
        is_differentiable = torch.is_grad_enabled()
        return Wanted(
            hidden=is_differentiable and self.hidden.requires_grad,
            weight=is_differentiable and self.weight.requires_grad,
            weight_dtype=self.weight.dtype if self.main_grad is None else torch.float32,
        )


class _FusedLoss(torch.autograd.Function):
    """Autograd node whose backward returns the gradients that the forward computed, times grad_output."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        gradients: HeadGradients | None,
        loss: Tensor,
        main_grad: MainGrad | None,
    ) -> Tensor:
        ctx.weight, ctx.gradients, ctx.main_grad = weight, gradients, main_grad
        return loss.clone()  # a copy, because autograd turns an input that is returned into a view

    @staticmethod
    @first_derivative_only("linear_policy_loss")
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        gradients: HeadGradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "linear_policy_loss: second backward pass through one forward pass; run the forward pass again"
            )
        ctx.gradients = None
        grad_hidden, grad_weight = gradients.grad_hidden, gradients.grad_weight
        # Keep the scale on the device: reading it would make the host wait.
        scale: float | Tensor = grad_output if grad_output.is_cuda else float(grad_output)
        if grad_hidden is not None:
            grad_hidden = _scaled_(grad_hidden, scale)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None, None
        if ctx.main_grad is not None:
            if grad_weight is not None:
                _add_scaled_(ctx.main_grad.total, grad_weight, scale)
            del gradients, grad_weight  # freed before the placeholder is allocated
            return grad_hidden, ctx.main_grad.placeholder(), None, None, None
        if grad_weight is None:
            return grad_hidden, torch.zeros_like(ctx.weight), None, None, None
        return grad_hidden, _scaled_to(grad_weight, scale, ctx.weight.dtype), None, None, None


def _scaled_(values: Tensor, scale: float | Tensor) -> Tensor:
    return values.mul_(scale) if isinstance(scale, Tensor) or scale != 1.0 else values


def _scaled_to(values: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return scale * values in this dtype, rounded once; on a device in one pass over values."""
    if values.dtype == dtype:
        return _scaled_(values, scale)
    if not isinstance(scale, Tensor) and scale == 1.0:
        return values.to(dtype)
    return torch.mul(values, scale, out=torch.empty_like(values, dtype=dtype))


def _add_scaled_(total: Tensor, values: Tensor, scale: float | Tensor) -> None:
    """Add scale * values to total in one pass over both."""
    if isinstance(scale, Tensor):
        total.addcmul_(values, scale)
    else:
        total.add_(values, alpha=scale)


def _run(load: Callable[[], RowKernels], gradients_of: Callable[..., HeadGradients], call: _Call) -> PolicyLoss:
    """Compute the loss and, if wanted, the gradients for a grad_output of 1.

    gradients_of: policy_gradients, or a function with its signature.

    Rows outside the mask never enter the first GEMM, and rows that are not active never enter the backward GEMMs. If m is the
    share of rows in the mask and a the share of active rows, one pass takes (2m + 4a) THV FLOPs. If the objective first needs the
    log-probs of whole sequences, two passes take (2m + 6a) THV.
    """
    kernels, head, hidden, tokens, wanted = load(), call.head, call.hidden.detach(), call.tokens, call.wanted
    rows = Rows.of(tokens.mask, hidden.shape[0], is_late=not kernels.is_host)
    gradients: HeadGradients | None = None
    if not needs_whole_sequences(tokens):
        statistics = Statistics.zeros(hidden.shape[0], hidden.device)
        terms = policy_terms(kernels, tokens, statistics.logprobs, statistics.entropy)
        gradients = gradients_of(kernels, head, hidden, rows, statistics, terms, wanted)
    else:
        statistics = head_statistics(kernels, head, hidden, rows)
        terms = policy_terms(kernels, tokens, statistics.logprobs, statistics.entropy)
        terms.evaluate(rows.settled())
        if wanted.any:
            slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient)
            gradients = head_gradients(kernels, head, hidden, slopes, wanted)
    sums = terms.sums()
    loss = _FusedLoss.apply(call.hidden, call.weight, gradients, total_loss(sums), call.main_grad)
    return PolicyLoss(loss, statistics.logprobs, statistics.entropy, terms.coefficient, agent_sums(sums))


def _on_rows(provider: RowProvider) -> Implementation:
    def why_not(call: _Call) -> str | None:
        return provider.why_not(hidden=call.hidden, weight=call.weight)

    return Implementation(
        provider.name, partial(_run, provider.load, policy_gradients), why_not, provider.machine_lacks
    )


_gradients_by_quack = late_function("linear_policy_loss.quack_head.gradients", "quack_gradients")


def _by_quack(call: _Call) -> PolicyLoss:
    load = ROW_PROVIDERS[0].load
    try:
        return _run(load, _gradients_by_quack, call)
    except UnlikelyTarget:
        pass  # retry after this block, so that the exception no longer holds the first attempt's buffers
    return _run(load, policy_gradients, call)


def _why_not_quack(call: _Call) -> str | None:
    return why_not_quack(call.head, call.hidden, call.tokens, call.wanted)


def _reference(call: _Call) -> PolicyLoss:
    head = call.head
    return linear_policy_loss_reference(
        call.hidden, call.weight, head.targets, call.temperature, head.num_columns, call.tokens, head.support
    )


def _why_not_reference(call: _Call) -> str | None:
    if call.main_grad is not None:
        return "main_grad is given, but the reference computes the gradient of the weight by autograd"
    return why_not_reference_head(call.head)


_OP = Op(
    "linear_policy_loss",
    (
        Implementation("quack", _by_quack, _why_not_quack, machine_lacks_quack),
        *map(_on_rows, ROW_PROVIDERS),
        Implementation("reference", _reference, _why_not_reference),
    ),
)
