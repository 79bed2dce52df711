"""The ops as torch.compile traces them, and as compiled code calls them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_op import CALLS, call, resized
from layout_cases import results, tensors_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from marsrl.kernels import (
    LossInputs,
    PolicyObjective,
    attention_varlen,
    grouped_linear,
    linear_logprob,
    linear_policy_loss,
)


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):  # our replacement for parts of Megatron disables it
        yield


TRACED = ("rms_norm", "swiglu", "attention_varlen", "grouped_linear", "linear_logprob, float32")
INPUTS = LossInputs(PolicyObjective(), torch.tensor([0, 4]), 4.0, advantages=torch.ones(1))


class Recorder(TorchDispatchMode):
    """Records the arguments of our ops' last calls: found[op]."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch._ops.OpOverload, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "marsrl":
            self.found[function] = args
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TRACED)
def test_an_op_is_compiled_whole_with_eager_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.library.opcheck accepts the op and its backward, and one graph serves all sizes."""
    op, backend = CALLS[name], CompileCounterWithBackend("aot_eager")
    with Recorder() as recorder, monkeypatch.context() as traced:
        traced.setattr(torch.compiler, "is_compiling", lambda: True)
        call(name)
    forward, backward = recorder.found
    torch.library.opcheck(forward, recorder.found[forward])
    torch.library.opcheck(backward, recorder.found[backward], test_utils=("test_schema", "test_faketensor"))

    def caller(tensors: dict[str, Tensor]) -> list[Tensor]:
        leaves = {which: tensors[which].sin() for which in op.leaves}
        return [out.cos() for out in op.run({**tensors, **leaves})]

    compiled = torch.compile(caller, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (6, 12):
        tensors = resized(tensors_of(op), num_tokens)
        torch.testing.assert_close(*(results(replace(op, run=each), tensors) for each in (compiled, caller)))
    assert backend.frame_count == 1


def test_values_are_checked_when_compiled_code_runs():
    x = torch.randn(4, 2, 8)
    attend = torch.compile(lambda bounds: attention_varlen(x, x, x, bounds), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"attention_varlen: cu_seqlens is \[0, 5\], expected to rise from 0 to 4"):
        attend(torch.tensor([0, 5]))
    hidden, weight = torch.randn(4, 8), torch.randn(40, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def logprobs(targets, temperature):
        return linear_logprob(hidden, weight, targets, temperature=temperature).logprobs

    with pytest.raises(ValueError, match=r"linear_logprob: targets\[1\] is 40, expected 0..39"):
        logprobs(torch.tensor([0, 40, 1, 1]), torch.ones(4))
    with pytest.raises(ValueError, match=r"linear_logprob: temperature\[2\] is -1.0, expected a positive"):
        logprobs(torch.zeros(4, dtype=torch.int64), torch.tensor([1.0, 1.0, -1.0, 1.0]))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# Functions of x [4, 8] (a head's hidden states, or rows of experts), weight [40, 8] and its main_grad.
BREAKS = {
    "linear_logprob has a tp_group, which a torch.library op cannot take": (
        lambda x, weight, main_grad, group: linear_logprob(x, weight, torch.arange(4), tp_group=group).logprobs
    ),
    "linear_policy_loss computes its gradients in the forward": (
        lambda x, weight, main_grad, group: linear_policy_loss(x, weight, torch.arange(4), INPUTS).loss
    ),
    "grouped_linear writes main_grad, which a torch.library op cannot pass": (
        lambda x, weight, main_grad, group: grouped_linear(
            x, weight.view(2, 20, 8), [1, 3], main_grad=main_grad.view(2, 20, 8)
        )
    ),
}


@pytest.mark.parametrize("reason", BREAKS)
def test_graph_breaks_keep_results_and_name_the_reason(reason, group):
    def caller(x, weight, main_grad):
        return BREAKS[reason](2 * x, weight, main_grad, group) * 3

    leaves, outcomes = [torch.randn(4, 8).requires_grad_(), torch.randn(40, 8).requires_grad_()], []
    for each in (caller, torch.compile(caller, backend="eager")):
        main_grad = torch.zeros(40, 8)
        out = each(*leaves, main_grad)
        of_x, of_weight = torch.autograd.grad(out.sum(), leaves, allow_unused=True)  # weight is unused with main_grad
        outcomes.append([out, of_x, main_grad if main_grad.any() else of_weight])
    assert all(map(torch.equal, *outcomes)) and all(each.any() for each in outcomes[0])
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=reason):
        torch.compile(caller, fullgraph=True, backend="eager")(*leaves, main_grad)
