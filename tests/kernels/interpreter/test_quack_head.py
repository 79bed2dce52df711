"""The head with QuACK's GEMMs, for which PyTorch stands in, and our interpreted Triton kernels between them."""

import importlib
import sys

import pytest
import quack_in_torch
import torch
from fused_head import arguments_for, compare_policy_loss, forced, head_case, linear_policy_loss, run_policy_loss
from test_head import PLAIN

from marsrl.kernels import PolicyObjective
from marsrl.kernels.head import chunked_head
from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows.subset import LateCount
from marsrl.kernels.linear_policy_loss import _OP, quack_head

BF16 = torch.bfloat16
OF_GEMMS = "marsrl.kernels.linear_policy_loss.quack_head.gemms"
OF_GRADIENTS = "marsrl.kernels.linear_policy_loss.quack_head.gradients"


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Simulate a GPU of compute capability 9.0 with QuACK."""
    quack_in_torch.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    quack_head.machine_lacks_quack.cache_clear()
    with forced("quack"):
        yield
    quack_head.machine_lacks_quack.cache_clear()
    sys.modules.pop(OF_GEMMS, None)


OBJECTIVES = ("pseudo on-policy", "clip", "strong gate", "cispo", "tis", "icepop", "k3")


@pytest.mark.parametrize(
    "name, temperature", [("clip", 1.5), *((name, torch.linspace(0.5, 1.5, 24)) for name in OBJECTIVES)]
)
def test_an_objective_equals_its_definition(name, temperature):
    case = head_case(24, 16, 384)
    compare_policy_loss(case, arguments_for(case, name, temperature=temperature), BF16)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_chunks_in_which_all_or_few_rows_are_active(share, monkeypatch):
    """Chunks have 128 rows, the minimum. If few rows of a chunk have a coefficient, these rows are packed."""
    monkeypatch.setattr(chunked_head, "DEVICE_GRADIENT_BYTES", 1)
    case = head_case(150, 8, 128)
    arguments = arguments_for(case, "no gate", advantages=None)
    arguments["token_advantages"] = torch.randn(150) * (torch.rand(150) < share)
    arguments["mask"] = torch.arange(150) != 3
    compare_policy_loss(case, arguments, BF16)


def in_chunks(monkeypatch, rows, ahead, num_tokens=700, vocab=128):
    """Return (loss, [dX, dW]) of num_tokens tokens, computed in chunks of `rows` rows.

    ahead: number of the next chunk's rows that are computed while the host waits. Every 50th token is masked.
    """
    monkeypatch.setattr(chunked_head, "DEVICE_GRADIENT_BYTES", rows * 2 * vocab)
    monkeypatch.setattr(chunked_head, "whole_waves", lambda at_most, *_: at_most)
    gradients = importlib.import_module(OF_GRADIENTS)
    monkeypatch.setattr(gradients, "AHEAD_BYTES", ahead * 2 * vocab)
    torch.manual_seed(0)
    case = head_case(num_tokens, 8, vocab)
    arguments = arguments_for(case, "no gate", advantages=None)
    arguments["token_advantages"], arguments["mask"] = torch.randn(num_tokens), torch.arange(num_tokens) % 50 != 3
    return run_policy_loss(case, arguments, BF16)


def test_first_rows_ahead_of_a_chunk_change_no_bit(monkeypatch):
    (_, few), (_, all_rows) = (in_chunks(monkeypatch, 384, ahead) for ahead in (128, 384))
    assert len(few) == 2 and all(torch.equal(a, b) and a.any() for a, b in zip(few, all_rows, strict=True))


def test_the_next_product_is_queued_before_the_host_waits(monkeypatch):
    events = []

    def note(event, owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: events.append(event) or call(*args))

    note("product", importlib.import_module(OF_GRADIENTS).gemms, "exponentials")
    note("wait", LateCount, "wait")
    note("dW", HeadGemms, "add_weight_gradient")
    in_chunks(monkeypatch, 256, 128)
    first, last = ["product", "wait", "wait", "product", "wait", "wait", "dW"], ["product", "wait", "wait", "dW"]
    assert events == [*first, "product", "product", "wait", "wait", "dW", *last]


@pytest.mark.parametrize("far", [60, 150])
@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_that_are_hard_for_a_softmax(is_packed, far):
    """Rows are ordinary, large, sure of their target, or have a target with a log-prob of about -far.

    If a log-prob is below -69, our own kernels compute the batch.
    """
    z = torch.randn(6, 256)
    z[1] *= 10
    z[2, 7] += 40
    z[3, 200] += far - 10
    z[4, :128] += far
    z[5, 128:] -= far
    case = torch.eye(16)[:6], torch.cat((z.t(), torch.zeros(256, 10)), 1), torch.tensor([3, 5, 7, 1, 130, 200])
    arguments = {
        "objective": PLAIN,
        "token_advantages": torch.tensor([*([0.0] * 3 if is_packed else [1.0, -2.0, 1.0]), 0.5, 1.5, -1.0]),
        "mask": torch.ones(6, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 6]),
        "normaliser": 1.0,
    }
    compare_policy_loss(case, arguments, BF16)
    _, by_quack = run_policy_loss(case, arguments, BF16)
    with forced("triton"):
        _, by_ours = run_policy_loss(case, arguments, BF16)
    assert torch.equal(by_quack[1], by_ours[1]) == (far > 69)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_single_gradient_equals_that_of_both(frozen):
    grads = {}
    hidden, weight, targets = (each.to(BF16) if each.is_floating_point() else each for each in head_case(7, 8, 128))
    arguments = {"objective": PLAIN, "token_advantages": torch.randn(7), "cu_seqlens": torch.tensor([0, 7])}
    for which in ("both", frozen):
        leaves = {"hidden": hidden.clone(), "weight": weight.clone()}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name != which)
        linear_policy_loss(*leaves.values(), targets, **arguments, normaliser=1.0).loss.backward()
        grads[which] = leaves
    (other,) = {"hidden", "weight"} - {frozen}
    assert torch.equal(grads[frozen][other].grad, grads["both"][other].grad) and grads[frozen][frozen].grad is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "but quack computes in bfloat16"),
        ({"vocab": 131}, "expected multiples of 128"),
        ({"size": 12}, "expected multiples of 128 and 8"),
        ({"real_vocab_size": 100}, "padded"),
        ({"objective": PolicyObjective(entropy_coef=0.1)}, "entropy bonus"),
        ({"objective": PolicyObjective(ratio="sequence"), "old_logprobs": torch.zeros(6)}, "whole sequences"),
        ({"frozen": True}, "no gradient is needed"),
    ],
)
def test_unsupported_calls_name_the_reason_and_use_our_kernels(changes, reason, monkeypatch):
    dtype, frozen = changes.pop("dtype", BF16), changes.pop("frozen", False)
    hidden, weight, targets = head_case(6, changes.pop("size", 8), changes.pop("vocab", 128))
    hidden, weight = hidden.to(dtype).requires_grad_(not frozen), weight.to(dtype)
    arguments = {"objective": PLAIN, "token_advantages": torch.ones(6), "cu_seqlens": torch.tensor([0, 6]), **changes}
    with pytest.raises(RuntimeError, match=reason):
        linear_policy_loss(hidden, weight, targets % 100, **arguments, normaliser=1.0)
    monkeypatch.delenv("MARSRL_KERNELS")
    assert linear_policy_loss(hidden, weight, targets % 100, **arguments, normaliser=1.0).loss.isfinite()


def test_quack_is_preferred_only_on_hopper(monkeypatch):
    monkeypatch.delenv("MARSRL_KERNELS")
    assert _OP.explain(lambda each: each.machine_lacks()).chosen == "quack"
    monkeypatch.setitem(sys.modules, "quack.epilogue.ops", None)
    sys.modules.pop(OF_GEMMS, None)
    quack_head.machine_lacks_quack.cache_clear()
    found = _OP.explain(lambda each: each.machine_lacks())
    assert found.chosen == "triton" and "quack is installed but cannot be imported" in found.reasons["quack"]
