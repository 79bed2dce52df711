"""Gradient of an op: one autograd node around the forward and the backward of an implementation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from marsrl.kernels.dispatch import Implementation, late_object, without_autocast
from marsrl.kernels.triton_machine import machine_lacks_triton


def first_derivative_only(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a backward so that it raises under create_graph=True.

    Without this check, autograd would treat the backward's result as a constant, and a gradient penalty would silently have no
    gradient. torch's once_differentiable does not suffice: it raises only if the incoming gradient requires a gradient.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():  # grad mode is on in a backward only under create_graph
                raise RuntimeError(
                    f"{op}: create_graph=True needs second derivatives, which are not supported; use create_graph=False"
                )
            return backward(ctx, *gradients)

        return checked

    return decorate


class Kernels(Protocol):
    """Forward and backward of one implementation of an op."""

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the op's outputs, followed by tensors that only the backward reads."""

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the leading arguments, one per entry of `needs`.

        A gradient is None if its entry is False. args: arguments of `forward`. saved: tensors that it returned for the
        backward. grads: gradients of its outputs.
        """


class Recomputed:
    """Kernels of a function that autograd can differentiate; the backward calls the function again.

    All of the backward then runs inside one node, with autocast off. With plain autograd, its matrix products would be nodes of
    the caller's graph and run under the caller's autocast.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return _as_tuple(self._function(*args))

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        leaves = [arg.detach().requires_grad_() if is_needed else arg for arg, is_needed in zip(args, needs)]
        grad_leaves = [leaf for leaf, is_needed in zip(leaves, needs) if is_needed]
        with torch.enable_grad():
            outputs = _as_tuple(self._function(*leaves, *args[len(needs) :]))
        ends = [(output, grad) for output, grad in zip(outputs, grads) if output.requires_grad]
        if ends:
            of_outputs = tuple(grad for _, grad in ends)
            gradients = iter(
                torch.autograd.grad([out for out, _ in ends], grad_leaves, of_outputs, materialize_grads=True)
            )
        else:  # an empty batch: no output depends on the arguments
            gradients = map(torch.zeros_like, grad_leaves)
        return [next(gradients) if is_needed else None for is_needed in needs]


@dataclass(frozen=True)
class Gradient:
    """Builder of an op's autograd node, which runs Kernels and saves tensors for the backward.

    num_tensors: number of leading arguments that are tensors or None. All are saved, and get a gradient if they require one.
    num_outputs: number of results of Kernels.forward that are returned to the caller.
    saves_outputs: whether the backward also reads the outputs.
    num_unread: number of leading tensors whose values the backward does not read. Only their shape and dtype are saved.
    """

    op: str
    num_tensors: int
    num_outputs: int = 1
    saves_outputs: bool = False
    num_unread: int = 0
    node: Any = field(init=False)  # autograd.Function named after the op, for profilers

    def __post_init__(self) -> None:
        num_tensors, num_outputs, first_saved = self.num_tensors, self.num_outputs, self.first_saved

        def forward(ctx: Any, kernels: Kernels, *args: Any) -> Tensor | tuple[Tensor, ...]:
            results = kernels.forward(*args)
            ctx.save_for_backward(*self.as_saved(args[:num_tensors]), *results[first_saved:])
            ctx.kernels, ctx.constants = kernels, args[num_tensors:]
            return results[0] if num_outputs == 1 else results[:num_outputs]

        @first_derivative_only(self.op)
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[1 : 1 + num_tensors]
            args = (*tensors[:num_tensors], *ctx.constants)
            gradients = without_autocast(ctx.kernels.backward, args, tensors[num_tensors:], grads, needs)
            return (None, *gradients, *(None for _ in ctx.constants))

        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        object.__setattr__(self, "node", type(self.op, (torch.autograd.Function,), functions))

    @property
    def first_saved(self) -> int:
        """Index of the first result that is saved for the backward."""
        return 0 if self.saves_outputs else self.num_outputs

    def as_saved(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the leading arguments to save for the backward.

        Placeholders without memory replace arguments whose values the backward does not read.
        """
        unread = (tensor.new_empty(()).expand(tensor.shape) for tensor in tensors[: self.num_unread])
        return (*unread, *tensors[self.num_unread :])

    def implementation(
        self,
        name: str,
        load: Callable[[], Kernels],
        why_not: Callable[..., str | None] = lambda *args: None,
        machine_lacks: Callable[[], str | None] = lambda: None,
    ) -> Implementation:
        """Build an implementation from the Kernels that `load` returns; `load` is called at the first use."""

        def run(*args: Any) -> Any:
            return self.node.apply(load(), *args)

        return Implementation(name, run, why_not, machine_lacks, load)

    def triton(self, module: str, name: str, why_not: Callable[..., str | None]) -> Implementation:
        """Build the implementation `triton` from the Kernels class `name` in marsrl.kernels.<module>."""
        return self.implementation("triton", late_object(module, name), why_not, machine_lacks_triton)

    def reference(self, function: Callable[..., Any], why_not: Callable[..., str | None] = lambda *args: None) -> Any:
        """Build the implementation `reference` from a function that PyTorch can differentiate."""
        return self.implementation("reference", lambda: Recomputed(function), why_not)


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
