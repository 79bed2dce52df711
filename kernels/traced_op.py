"""Registration of ops for torch.compile, as torch.ops.marsrl.<name>, with fake kernel and gradient.

    eager                               traced
    op(...)                             torch.ops.marsrl.<name>(...), in the backward torch.ops.marsrl.<name>_backward(...)
      the node of differentiable.py       op.choose, when the compiled code runs
        Kernels.forward, .backward          Kernels.forward, .backward

A call of the registered op takes 17 us more Python time than a call of the node (measured for rms_norm's forward), so eager code
calls the node. Importing marsrl.kernels registers the ops, because torch.compile must find them before the first call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.differentiable import Gradient, Kernels, Recomputed, first_derivative_only
from marsrl.kernels.dispatch import Op, without_autocast

_LIBRARY = torch.library.Library("marsrl", "FRAGMENT")


def register(
    op: Op,
    gradient: Gradient,
    arguments: str,
    results: Callable[..., tuple[Tensor, ...]],
    num_results: int,
    prepare: Callable[..., tuple[Any, ...]] = lambda *given: given,
) -> None:
    """Register an op as torch.ops.marsrl.<name>.

    arguments: torch.library schema of the registered op's arguments; those that `gradient` differentiates come first.
    results: takes these arguments (real or fake tensors), and allocates uninitialised results of Kernels.forward.
    num_results: number of tensors that `results` returns.
    prepare: takes these arguments (real tensors only), checks them, and returns the arguments of `op`.
    """
    name, num_tensors = f"marsrl::{op.name}", gradient.num_tensors
    types = ", ".join(["Tensor"] * num_results)
    _LIBRARY.define(f"{op.name}({arguments}) -> ({types})")
    _LIBRARY.define(f"{op.name}_backward(Tensor[] grads, Tensor[] saved, bool[] needs, {arguments}) -> Tensor[]")
    backward_op = getattr(torch.ops.marsrl, f"{op.name}_backward")

    def forward(*given: Any) -> Any:
        args = prepare(*given)
        tensors = without_autocast(_kernels(op, args).forward, *args)
        # Recomputed.forward returns only outputs. The tensors that other Kernels save are filled with -inf: should MARSRL_KERNELS
        # change before the backward, so that another implementation reads them, its gradients are visibly not finite.
        unread = (tensor.fill_(-torch.inf) for tensor in results(*given)[len(tensors) :])
        return _one_or_all((*map(_own, tensors), *unread))

    def backward(grads: list[Tensor], saved: list[Tensor], needs: list[bool], *given: Any) -> list[Tensor]:
        args = prepare(*given)
        results = without_autocast(_kernels(op, args).backward, args, saved, grads, needs)
        return [_own(grad) for grad in results if grad is not None]

    def fake(*given: Any) -> Any:
        return _one_or_all(results(*given))

    def fake_backward(grads: list[Tensor], saved: list[Tensor], needs: list[bool], *given: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x, needed in zip(given, needs) if needed]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*outputs[gradient.num_outputs :])
        ctx.is_tensor = [isinstance(arg, Tensor) for arg in inputs]
        ctx.constants = [arg for arg in inputs if not isinstance(arg, Tensor)]
        tensors = gradient.as_saved([arg for arg in inputs if isinstance(arg, Tensor)])
        ctx.num_saved = len(outputs) - gradient.first_saved
        ctx.save_for_backward(*outputs[gradient.first_saved :], *tensors)

    @first_derivative_only(op.name)
    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, tensors = list(ctx.saved_tensors[: ctx.num_saved]), iter(ctx.saved_tensors[ctx.num_saved :])
        constants = iter(ctx.constants)
        inputs = [next(tensors) if is_tensor else next(constants) for is_tensor in ctx.is_tensor]
        needs = list(ctx.needs_input_grad[:num_tensors])
        gradients = iter(backward_op(list(grads[: gradient.num_outputs]), saved, needs, *inputs))
        return tuple(next(gradients) if is_needed else None for is_needed in ctx.needs_input_grad)

    for suffix, kernel, of_fakes in (("", forward, fake), ("_backward", backward, fake_backward)):
        _LIBRARY.impl(op.name + suffix, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(name + suffix, of_fakes, lib=_LIBRARY)
    torch.library.register_autograd(name, differentiate, setup_context=setup_context, lib=_LIBRARY)


def _kernels(op: Op, args: tuple[Any, ...]) -> Kernels:
    chosen = op.choose(*args)
    return Recomputed(chosen.run) if chosen.load is None else chosen.load()


def _own(result: Tensor) -> Tensor:
    """Return the result, or a copy, so that it is contiguous and no view, as the fake kernel promises."""
    is_whole = result.is_contiguous() and result.untyped_storage().nbytes() == result.nbytes
    return result if is_whole else result.clone(memory_format=torch.contiguous_format)


def _one_or_all(results: tuple[Tensor, ...]) -> Any:
    return results if len(results) > 1 else results[0]
