"""The backward of an op that has a first derivative only."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative_only(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a backward: under create_graph=True it refuses. Its result would count as a constant, and a penalty on a
    gradient would have no gradient, without a word: torch's once_differentiable refuses only where what comes in has one.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():  # in a backward: create_graph
                raise RuntimeError(
                    f"{op}: create_graph=True asks for a second derivative, and there is a first one only"
                )
            return backward(ctx, *gradients)

        return checked

    return decorate
