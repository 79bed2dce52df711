"""The first GEMM that leaves statistics and exponentials, interpreted, with tiles so small that it needs many."""

import pytest
import torch
import torch.distributed as dist
from fused_head import (
    arguments_for,
    forced,
    head_case,
    linear_policy_loss,
    run_policy_loss,
)
from small_tiles import TILES, in_chunks, use_small_tiles

from marsrl.kernels import PolicyObjective, linear_logprob
from marsrl.kernels.head.first_gemm import triton_impl
from marsrl.kernels.head.first_gemm.triton_impl import TritonFirstGemm
from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows import triton_impl as rows_impl
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head, make_head

NAME = "linear_policy_loss=triton_gemm,linear_logprob=triton_gemm"


@pytest.fixture(autouse=True)
def _small_and_by_name(monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", NAME)
    use_small_tiles(monkeypatch)


def test_without_a_gradient_nothing_is_written_and_the_statistics_have_the_same_bits(monkeypatch):
    in_chunks(monkeypatch, 5)
    hidden, weight, targets = head_case(12, 8)
    weight = weight.bfloat16()
    arguments = {
        "objective": PolicyObjective(),
        "token_advantages": torch.randn(12),
        "mask": torch.arange(12) != 3,
        "cu_seqlens": torch.tensor([0, 12]),
        "normaliser": 11.0,
    }
    written = []
    multiply = TritonFirstGemm.multiply
    monkeypatch.setattr(TritonFirstGemm, "multiply", lambda *given: (written.append(given[-1]), multiply(*given))[1])
    leaf = hidden.bfloat16().requires_grad_()
    trained = linear_policy_loss(leaf, weight, targets, **arguments)
    assert written and all(each.dtype == torch.bfloat16 for each in written)  # 2 bytes a logit
    written.clear()
    with torch.no_grad():
        evaluated = linear_policy_loss(leaf, weight, targets, **arguments)
    linear_logprob(leaf, weight, targets)
    assert written and not any(each.shape[1] for each in written)
    for field in ("loss", "logprobs", "entropy", "coefficient"):
        assert torch.equal(getattr(trained, field), getattr(evaluated, field))


@pytest.mark.parametrize("capability", [80, 90])
def test_exponentials_are_relative_to_a_power_of_two_and_padding_is_not_read(capability, monkeypatch):
    monkeypatch.setattr(triton_impl, "capability", lambda: capability)
    hidden, weight, targets = head_case(9, 8, 96)
    hidden, weight, targets = hidden.bfloat16(), weight.bfloat16(), targets % 70
    weight[70:] = torch.nan
    head = make_head("op", hidden, weight, targets, 0.5, None, 70)
    out = torch.full((9, 96), 7.0)
    pieces = TritonFirstGemm().multiply(None, hidden, Rows(None, 0, 9), head, out).pieces
    z = 2 * (hidden.double() @ weight[:70].double().t())
    for tile, begin in enumerate(range(0, 70, TILES.n)):
        columns = slice(begin, min(begin + TILES.n, 70))
        exact = (
            z[:, columns]
            - torch.log(torch.tensor(2.0)) * (pieces[0, tile].double() * 2 * 1.4426950408889634).ceil()[:, None]
        ).exp()
        exact[targets[:, None] == torch.arange(70)[columns]] = 0
        torch.testing.assert_close(out[:, columns].double(), exact, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(pieces[0, tile].double() * 2, z[:, columns].amax(1), rtol=1e-6, atol=1e-6)
    assert not out[:, 70:].any()  # the rest of the last tile; the row kernel reads no further than the real columns
    assert out.max() <= 1 and ((out.amax(1) > 0.25) | (out.amax(1) == 0)).all()


def test_no_product_of_the_library_has_logits_and_known_statistics_give_the_gradient_at_once(monkeypatch):
    monkeypatch.setattr(HeadGemms, "logits", lambda *_: pytest.fail("logits of the library"))
    hidden, weight, targets = (each if each.dtype == torch.int64 else each.bfloat16() for each in head_case(6, 8))
    out = linear_logprob(hidden.requires_grad_(), weight, targets)
    monkeypatch.setattr(TritonFirstGemm, "multiply", lambda *_: pytest.fail("nothing but dz is wanted here"))
    monkeypatch.setattr(TritonFirstGemm, "gradients", lambda *_: pytest.fail("there is nothing to turn into dz"))
    out.logprobs.sum().backward()
    assert hidden.grad.any()


def test_shards_have_the_partials_that_the_row_kernel_finds():
    hidden, weight, targets = head_case(6, 8, 80)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    for begin, columns in ((0, 40), (40, 31), (40, 0)):  # whole, with padding, nothing but padding
        shard = weight[begin : begin + 40]
        head = make_head("op", hidden, shard, targets % 40, torch.rand(6) + 0.5, None, None)
        head = type(head)(**{**vars(head), "first_column": begin, "num_columns": columns})
        rows, gemm = Rows(None, 0, 6), TritonFirstGemm()
        found = gemm.partials(gemm.multiply(None, hidden, rows, head, hidden[:, :0]), rows, head)
        expected = rows_impl.TritonRowKernels().partials(hidden.float() @ shard.float().t(), rows, head)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_statistics_that_travel_between_ranks_arrive_as_they_are_found_on_one(monkeypatch, tmp_path):
    case = head_case(11, 8)
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    in_chunks(monkeypatch, 4)
    alone, *gradients = run_policy_loss(case, arguments, torch.bfloat16)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        monkeypatch.setattr(Head, "is_sharded", True)  # a group of one takes the way of many
        found, *of_group = run_policy_loss(case, {**arguments, "tp_group": dist.group.WORLD}, torch.bfloat16)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found.logprobs, alone.logprobs)
    torch.testing.assert_close(found.entropy, alone.entropy)
    torch.testing.assert_close(of_group, gradients, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(
    "of_hidden, of_weight, reason",
    [
        (torch.float32, torch.float32, "hidden float32, weight float32: tensor cores would round float32 to TF32"),
        (torch.bfloat16, torch.float16, "hidden bfloat16, weight float16: tensor cores multiply pairs of one dtype"),
        (torch.float64, torch.float64, "float64 input"),
    ],
)
def test_what_it_cannot_multiply_is_refused_with_the_reason(of_hidden, of_weight, reason):
    hidden, weight, targets = head_case(4, 8)
    with pytest.raises(RuntimeError, match=f"MARSRL_KERNELS=triton_gemm cannot serve .*linear_logprob: .*{reason}"):
        linear_logprob(hidden.to(of_hidden), weight.to(of_weight), targets)


def test_it_is_taken_by_name_only():
    hidden, weight, targets = (each if each.dtype == torch.int64 else each.bfloat16() for each in head_case(4, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MARSRL_KERNELS")
        patch.setattr(TritonFirstGemm, "multiply", lambda *_: pytest.fail("nobody asked for it"))
        linear_logprob(hidden, weight, targets)
        with pytest.raises(pytest.fail.Exception, match="nobody"), forced("linear_logprob=triton_gemm"):
            linear_logprob(hidden, weight, targets)
