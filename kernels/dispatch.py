"""Dispatch of an op's calls to its implementations, with the reasons why one is not chosen.

Each op lists its implementations in order of preference; a call runs the first one that supports it. `MARSRL_KERNELS=<name>`
(such as `cpu` or `reference`) forces one implementation for every op. A call then raises RuntimeError if its op has no
implementation of that name, or if that implementation does not support the call. `MARSRL_KERNELS=<op>=<name>[,<op>=<name>...]`
forces the implementations of single ops.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch

ENVIRONMENT = "MARSRL_KERNELS"
_OPS: dict[str, "Op"] = {}


@dataclass(frozen=True)
class Implementation:
    """Implementation of an op, and the conditions under which it can be used.

    run: computes the op from its arguments.
    why_not: takes the arguments of `run`, and returns None if `run` supports them, else the reason.
    machine_lacks: returns None if this machine can run the implementation at all, else the reason.
    load: returns the Kernels (differentiable.py) that `run` uses. None: PyTorch differentiates `run`, or the op has no gradient.
    """

    name: str
    run: Callable[..., Any]
    why_not: Callable[..., str | None] = lambda *args: None
    machine_lacks: Callable[[], str | None] = lambda: None
    load: Callable[[], Any] | None = None


def without_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with autocast off, because an op chooses the precision of its arithmetic itself."""
    if not torch._C._is_any_autocast_enabled():
        return function(*args)
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return function(*args)


def why_not_host(name: str, tensor: torch.Tensor) -> str | None:
    """Return None if a CPU implementation can read the tensor, else the reason.

    name: the tensor's name in the reason.
    """
    return (
        None if tensor.device.type == "cpu" else f"{name} is on {tensor.device}, this implementation reads host memory"
    )


def of_first(why_not: Callable[[str, torch.Tensor], str | None], name: str) -> Callable[..., str | None]:
    """Return a why_not for Implementation that checks only the first argument, called `name`."""
    return lambda first, *_: why_not(name, first)


def late_function(module: str, name: str) -> Callable[..., Any]:
    """Return a wrapper of a function of marsrl.kernels.<module>, whose first call imports the module.

    Triton is therefore imported only when it is needed.
    """
    find = cache(lambda: getattr(import_module(f"marsrl.kernels.{module}"), name))
    return lambda *args: find()(*args)


def late_object(module: str, name: str) -> Callable[[], Any]:
    """Return a function that returns one instance of a class, which its first call creates.

    module, name: the class is marsrl.kernels.<module>.<name>.
    """
    return cache(lambda: getattr(import_module(f"marsrl.kernels.{module}"), name)())


@dataclass(frozen=True)
class Op:
    """Public operation with its implementations, in order of preference."""

    name: str
    implementations: tuple[Implementation, ...]
    by_name: dict[str, Implementation] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "by_name", {implementation.name: implementation for implementation in self.implementations}
        )
        _OPS[self.name] = self

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # bypassing the tracer costs time, so eager calls do not do it
            return self._run_untraced(*args)
        return self._run(*args)

    def _run(self, *args: Any) -> Any:
        return without_autocast(self.choose(*args).run, *args)

    # Dynamo cannot trace ctypes calls and kernel launches. torch.compiler.disable would do the same, but imports
    # torch._dynamo at once.
    _run_untraced = torch._disable_dynamo(_run)

    def choose(self, *args: Any) -> Implementation:
        """Return the first implementation that can serve these arguments, or the forced one.

        Raises:
            ValueError: MARSRL_KERNELS names an unknown implementation or op.
            RuntimeError: the op has no implementation of the forced name, the forced implementation does not support the call, or
                no implementation does. The message has the reasons.
        """
        forced = forced_name(self.name)
        if forced is not None:
            if forced not in self.by_name:
                raise RuntimeError(
                    f"{ENVIRONMENT}={forced} cannot serve {self.name}, which has {', '.join(self.by_name)}; "
                    f"unset {ENVIRONMENT} or name one of these"
                )
            implementation = self.by_name[forced]
            reason = implementation.machine_lacks() or implementation.why_not(*args)
            if reason is not None:
                raise RuntimeError(f"{ENVIRONMENT}={forced} cannot serve this call of {self.name}: {reason}")
            return implementation
        reasons = []
        for implementation in self.implementations:
            reason = implementation.machine_lacks() or implementation.why_not(*args)
            if reason is None:
                return implementation
            reasons.append(f"{implementation.name}: {reason}")
        raise RuntimeError(f"no implementation of {self.name} can serve this call; " + "; ".join(reasons))

    def explain(self, why_not: Callable[[Implementation], str | None]) -> "Explanation":
        """Return the implementation that would be chosen, and why the others would not.

        why_not: takes an implementation, and returns the reason why it cannot be used, or None.
        """
        forced = forced_name(self.name)
        chosen: str | None = None
        reasons: dict[str, str] = {}
        for implementation in self.implementations:
            reason = why_not(implementation)
            if reason is None and forced is not None and implementation.name != forced:
                reason = f"{ENVIRONMENT}={os.environ[ENVIRONMENT]}"
            if reason is None and chosen is not None:
                reason = f"{chosen} is preferred"
            if reason is None:
                chosen = implementation.name
            else:
                reasons[implementation.name] = reason
        return Explanation(self.name, chosen, reasons)


def forced_name(op: str) -> str | None:
    """Return the name that MARSRL_KERNELS forces for this op, or None.

    Raises:
        ValueError: MARSRL_KERNELS contains an unknown op or name.
    """
    if ENVIRONMENT not in os.environ:  # twice as fast as os.environ.get, which catches a KeyError internally
        return None
    text = os.environ[ENVIRONMENT]
    if not text:
        return None
    if "=" not in text:
        _check_known(text, text, {name for known_op in _OPS.values() for name in known_op.by_name})
        return text
    forced = None
    for part in text.split(","):
        op_name, _, name = part.strip().partition("=")
        _check_known(text, op_name, set(_OPS))
        _check_known(text, name, set(_OPS[op_name].by_name))
        if op_name == op:
            forced = name
    return forced


def _check_known(text: str, word: str, known: set[str]) -> None:
    if word not in known:
        where = "" if word == text else f" has {word!r}"
        raise ValueError(f"{ENVIRONMENT}={text!r}{where}: expected one of {', '.join(sorted(known))}")


@dataclass(frozen=True)
class Explanation:
    """Chosen implementation of an op, or of one kind of its calls, as `marsrl doctor` prints it."""

    op: str
    chosen: str | None  # None if the op cannot run here
    reasons: dict[str, str]  # implementation -> why it is not chosen


def explain() -> list[Explanation]:
    """Return the implementation of each op on this machine, and why the others are not chosen.

    Only the machine is checked. An implementation can still refuse the tensors of a single call.
    """
    return [op.explain(lambda implementation: implementation.machine_lacks()) for _, op in sorted(_OPS.items())]
