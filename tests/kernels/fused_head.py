"""Cases of the fused head and checks of its results, shared by the tests of all implementations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from judging import judge
from policy_cases import OBJECTIVES, poison_masked, policy_case
from torch import Tensor

from marsrl import kernels
from marsrl.kernels import LossInputs, PolicyLoss, Support, linear_logprob
from marsrl.kernels.head import chunked_head, tiles
from marsrl.kernels.head.host_memory import HostBudget
from marsrl.kernels.linear_logprob.reference import linear_logprob_reference
from marsrl.kernels.testing import assert_accurate, off_by_an_ulp

Head = tuple[Tensor, Tensor, Tensor]  # hidden [T, H], weight [V, H], targets [T]
Arguments = dict[str, Any]


_OF_LOSS = {field.name for field in fields(LossInputs)}


def linear_policy_loss(hidden: Tensor, weight: Tensor, targets: Tensor, **arguments: Any) -> PolicyLoss:
    """Call the op with arguments by name, among them the fields of LossInputs."""
    inputs = LossInputs(**{name: value for name, value in arguments.items() if name in _OF_LOSS})
    rest = {name: value for name, value in arguments.items() if name not in _OF_LOSS}
    return kernels.linear_policy_loss(hidden, weight, targets, inputs, **rest)


def policy_loss(logprobs: Tensor, entropy: Tensor, **arguments: Any) -> PolicyLoss:
    """Call policy_loss with the fields of LossInputs by name."""
    return kernels.policy_loss(logprobs, entropy, LossInputs(**arguments))


def chunks_of(rows: int, patch: pytest.MonkeyPatch) -> None:
    """Limit the CPU's buffers to `rows` rows of logits, whatever the vocabulary size."""
    for module, name in ((chunked_head, "HOST"), (tiles, "EXPONENTIALS")):
        patch.setattr(module, name, HostBudget(num_bytes=0, num_rows=rows, max_bytes=2**40))


def use_device_chunks(rows: int, patch: pytest.MonkeyPatch, vocab: int) -> None:
    """Make a device compute logits in chunks of this many rows, and keep the gradients of two chunks for the backward GEMMs."""
    row_bytes = 4 * (-(-vocab // chunked_head.COLUMN_MULTIPLE) * chunked_head.COLUMN_MULTIPLE)
    patch.setattr(chunked_head, "DEVICE_ROW_MULTIPLE", 1)
    patch.setattr(chunked_head, "DEVICE_LOGITS_BYTES", rows * row_bytes)
    patch.setattr(chunked_head, "DEVICE_GRADIENT_BYTES", 2 * rows * row_bytes)


@contextmanager
def forced(implementation: str) -> Iterator[None]:
    """Set MARSRL_KERNELS inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARSRL_KERNELS", implementation)
        yield


def head_case(num_tokens: int = 60, size: int = 16, vocab: int = 131, device: str = "cpu") -> Head:
    """Return a case; the magnitude of its logits, a few units, does not depend on `size`.

    A third of the rows give their target nearly all probability; one of these targets is the last column.
    """
    hidden = torch.randn(num_tokens, size, device=device)
    weight = torch.randn(vocab, size, device=device) * (0.5 * (16 / size) ** 0.5)
    targets = torch.randint(0, vocab, (num_tokens,), device=device)
    targets[num_tokens // 2 // 3 * 3 :][:1] = vocab - 1
    hidden[::3] += 20 * torch.nn.functional.normalize(weight[targets[::3]], dim=1)
    return hidden, weight, targets


def with_exact_logits(case: Head) -> Head:
    """Round numbers below 32 to eighths: sums of products are then exact in float32, in any order."""
    hidden, weight, targets = case
    assert max(hidden.abs().max(), weight.abs().max()) < 32, "more than the 8 bits of bfloat16"
    return (8 * hidden).round() / 8, (8 * weight).round() / 8, targets


def without_target(targets: Tensor, vocab: int) -> Tensor:
    """Return [V] bool: True for columns that are no row's target. Their gradients are comparatively small."""
    return torch.ones(vocab, dtype=torch.bool, device=targets.device).index_fill_(0, targets, False)


def support_of(targets: Tensor, vocab: int, *, whole: float = 0.3, most: int = 20, device: str = "cpu") -> Support:
    """Return a random support: a set of columns for each token, which includes the target.

    Every fifth token has only its target. A share `whole` of the tokens have all columns. Other sets have at most `most` columns.
    The sets are stored in another order than the tokens. The generator is separate, so later random numbers of a test do not
    change.
    """
    generator = torch.Generator().manual_seed(0)
    sets = []
    for number, target in enumerate(targets.tolist()):
        size = int(torch.randint(0, most, (), generator=generator)) if number % 5 else 0
        others = torch.randperm(vocab, generator=generator)[:size].tolist()
        sets.append([] if torch.rand((), generator=generator) < whole else sorted({target, *others}))
    starts, ids = torch.zeros(len(sets), dtype=torch.int64), list[int]()
    for token in torch.randperm(len(sets), generator=generator).tolist():
        starts[token] = len(ids)
        ids += sets[token]
    counts = torch.tensor([len(each) for each in sets])
    of_ids = torch.tensor(ids, dtype=torch.int32)
    return Support(of_ids.to(device), starts.to(device), counts.to(device), int(counts.max()))


def arguments_for(case: Head, name: str, **changes: Any) -> Arguments:
    """Return policy_case's arguments, on the CPU, with log-probs near the head's: ratios are near 1."""
    objective, is_off_policy = OBJECTIVES[name]
    hidden, weight, targets = case
    arguments, _ = policy_case(hidden.shape[0], name=name)
    logits = hidden.double() @ weight.double().t()
    true = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].float().cpu()
    for key in ("old_logprobs", "rollout_logprobs", "reference_logprobs"):
        arguments[key] = true + 0.2 * torch.randn(hidden.shape[0])
    if not is_off_policy:
        arguments["old_logprobs"] = None
    return {**arguments, "objective": objective, **changes}


def to_device(arguments: Arguments, device: str) -> Arguments:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def in_double(arguments: Arguments) -> Arguments:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def run_loss(
    loss: Callable[..., PolicyLoss], leaves: Sequence[Tensor], arguments: Arguments, dtype: torch.dtype
) -> tuple[PolicyLoss, list[Tensor]]:
    """Return (result of the loss, gradients of 3 * loss with respect to the leaves)."""
    leaves = [each.detach().to(dtype).requires_grad_() for each in leaves]
    result = loss(*leaves, **(in_double(arguments) if dtype == torch.float64 else arguments))
    return result, list(torch.autograd.grad(3.0 * result.loss, leaves))


def run_policy_loss(case: Head, arguments: Arguments, dtype: torch.dtype) -> tuple[PolicyLoss, list[Tensor]]:
    hidden, weight, targets = case
    return run_loss(partial(linear_policy_loss, targets=targets), (hidden, weight), arguments, dtype)


def assert_policy_losses_close(
    ours: PolicyLoss, exact: PolicyLoss, plain: PolicyLoss, moved: PolicyLoss | None = None, terms: int = 1
) -> None:
    """Check a policy loss. moved, terms: as in assert_accurate; needed if log-probs come from a matrix product."""
    off = moved or exact
    for field in ("logprobs", "entropy", "coefficient"):
        values = [getattr(result, field).detach() for result in (ours, exact, plain, off)]
        assert_accurate(field, *values[:3], moved=values[3], terms=terms)
    if exact.coefficient.numel() == 0:
        return
    term = (exact.coefficient.abs() * (1 + exact.logprobs.abs())).max().item()  # largest term, within a small factor
    losses = [result.loss.detach() for result in (ours, exact, plain, off)]
    assert_accurate("loss", *losses[:3], term, losses[3], terms)
    # A log-prob subtracts the log of a sum of at least 1, so even near 0 it has the rounding error of 1. kl inherits it.
    scales = {"loss": term, "kl": max(1.0, exact.logprobs.abs().max().item())}
    for metric in exact.agent_sums:
        scale = scales.get(metric, 0.0)
        sums = [result.agent_sums[metric] for result in (ours, exact, plain, off)]
        assert_accurate(metric, *sums[:3], scale, sums[3], terms)


def compare_policy_loss(
    case: Head, arguments: Arguments, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PolicyLoss:
    """Compare linear_policy_loss on inputs with NaN at masked tokens with the definition on inputs without NaN."""
    hidden, weight, targets = (tensor.to(device) for tensor in case)
    arguments = to_device(arguments, device)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    mask = arguments["mask"]
    with forced("reference"):
        exact, exact_grads = run_policy_loss((hidden, weight, targets), arguments, torch.float64)
        plain, plain_grads = run_policy_loss((hidden, weight, targets), arguments, dtype)
        near = off_by_an_ulp(hidden), off_by_an_ulp(weight), targets
        moved, moved_grads = run_policy_loss(near, arguments, torch.float64)
    poisoned = hidden.masked_fill(~mask[:, None], torch.nan), weight, targets.masked_fill(~mask, -100)
    result, grads = run_policy_loss(poisoned, poison_masked(arguments), dtype)
    vocab, size = weight.shape
    assert_policy_losses_close(result, exact, plain, moved, terms=size)
    fields, terms = ("hidden.grad", "weight.grad"), (max(size, vocab), max(size, int(mask.sum())))
    apart = None, without_target(targets[mask], vocab)
    for field, longest, rows_apart, *values, off in zip(
        fields, terms, apart, grads, exact_grads, plain_grads, moved_grads
    ):
        assert_accurate(field, *values, moved=off, terms=longest, apart=rows_apart)
    assert not grads[0][~mask].any() and (result.logprobs <= 0).all()
    return result


def plain_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, columns: int
) -> tuple[Tensor, Tensor]:
    """Compute linear_logprob without a kernel: logits in the input's dtype, then float32 statistics."""
    logits = (hidden @ weight[:columns].t()).float()
    logits = logits / (temperature.float()[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def compare_logprob(
    case: Head,
    temperature: float | Tensor = 1.0,
    real: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    support: Support | None = None,
) -> list[Tensor]:
    """Compare linear_logprob with the definition: log-probs, entropy, and gradients of a random function of both."""
    hidden, weight, targets = (tensor.to(device) for tensor in case)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(device)
    columns, size = weight.shape[0] if real is None else real, hidden.shape[1]

    def ours(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = linear_logprob(h, w, targets, temperature=temperature, real_vocab_size=real, support=support)
        return out.logprobs, out.entropy

    results = judge(
        ("logprobs", "entropy", "hidden.grad", "weight.grad"),
        ours,
        lambda h, w: linear_logprob_reference(h, w, targets, temperature, columns, support),
        (hidden.to(dtype), weight.to(dtype)),
        torch.randn(2, hidden.shape[0], dtype=torch.float64).to(device),
        plain=None if support else lambda h, w: plain_logprob(h, w, targets, temperature, columns),
        terms=(size, size, max(size, columns), max(size, hidden.shape[0])),
        apart=(None, None, None, without_target(targets, weight.shape[0])),
        repeats=False,
    )
    assert (results[0] <= 0).all()
    return results


def compare_policy_loss_of_logprobs(name: str, num_tokens: int = 60, device: str = "cpu") -> None:
    """Compare policy_loss on inputs with NaN at masked tokens with the definition on inputs without NaN."""
    objective, is_off_policy = OBJECTIVES[name]
    arguments, logprobs = policy_case(num_tokens, name=name)
    logprobs[5] = -1e-4  # p > 0.99
    entropy = torch.rand(num_tokens)
    arguments["objective"] = objective
    if not is_off_policy:
        arguments["old_logprobs"] = None
    arguments, logprobs, entropy = to_device(arguments, device), logprobs.to(device), entropy.to(device)

    leaves = logprobs, entropy
    result, found_grads = run_loss(policy_loss, leaves, poison_masked(arguments), torch.float32)
    with forced("reference"):
        exact, exact_grads = run_loss(policy_loss, leaves, arguments, torch.float64)
        plain, plain_grads = run_loss(policy_loss, leaves, arguments, torch.float32)
    assert_policy_losses_close(result, exact, plain)
    for field, *grads in zip(("logprobs.grad", "entropy.grad"), found_grads, exact_grads, plain_grads):
        assert_accurate(field, *grads)
    assert not (found_grads[0] * ~arguments["mask"]).any() and not result.coefficient[~arguments["mask"]].any()
    torch.testing.assert_close(result.agent_sums["loss"].sum(), result.loss.detach(), atol=1e-6, rtol=1e-6)
