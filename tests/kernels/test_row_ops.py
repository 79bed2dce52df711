"""rms_norm, with and without rotation, and swiglu against autograd in float64; also in interpreter/test_ops.py."""

from functools import partial

import pytest
import torch
from every_op import IS_INTERPRETED
from judging import judge
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

from marsrl.kernels import rms_norm, swiglu

EPS = 1e-6
NAMES = ("output", "first gradient", "second gradient")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [
    ((5,), 7),
    ((1,), 1),
    ((70,), 96),
    ((3, 1), 1030),
    ((33, 1, 2), 32),
    ((5000,), 16),
    ((1, 2), 2),
    ((33, 2), 10),
]
TIERS = [("cpu", FP32), ("cpu", BF16), *(("reference", dtype) for dtype in (FP32, BF16, FP16))]
if IS_INTERPRETED:
    TIERS = [("triton", FP32), ("triton", BF16)]
    SHAPES = [pytest.param((19,), 16, marks=pytest.mark.smoke), ((5, 1), 3), ((1,), 21), ((7, 1, 3), 16), ((5,), 6)]


def eager_norm(x, weight, *, eps=EPS, is_zero_centred=False, rotation=None):
    """Normalise, and rotate as transformers does: x cos + rotate_half(x) sin, with cos and sin repeated for each pair."""
    out = torch_rms_norm(x, weight.shape, weight + is_zero_centred, eps)
    if rotation is None:
        return out
    shape = (x.shape[0], *[1] * (x.dim() - 2), -1)
    cos, sin = (torch.cat((each, each), -1).to(x.dtype).view(shape) for each in rotation.chunk(2, -1))
    first, second = out.chunk(2, -1)
    return out * cos + torch.cat((-second, first), -1) * sin


def eager_swiglu(products, weights=None):
    """Compute swiglu in plain PyTorch, which rounds the result of each step to its dtype."""
    gate, up = products.chunk(2, dim=-1)
    out = silu(gate) * up
    return (out if weights is None else out * weights.unsqueeze(-1)).to(products.dtype)


def compare_norm(shape, width, dtype, *, step=1, is_rotated=False, is_zero_centred=False, scale=1.0, device="cpu"):
    """Compare rms_norm with the definition.

    shape: shape of x without its last dimension, `width`. step: x is every step-th row of a larger tensor. scale: factor on x.
    """
    x = (torch.randn(*shape[:-1], step * shape[-1], width, device=device) * scale).to(dtype)[..., ::step, :]
    weight = torch.rand(width, device=device).to(dtype)
    angles = torch.rand(shape[0], width // 2, device=device) * 4000  # angles of positions up to a few thousand
    rotation = torch.cat((angles.cos(), angles.sin()), -1) if is_rotated else None
    words = {"eps": EPS, "is_zero_centred": is_zero_centred, "rotation": rotation}
    judge(NAMES, partial(rms_norm, **words), partial(eager_norm, **words), [x, weight])


def compare_swiglu(shape, width, dtype, *, has_weights=True, scale=1.0, device="cpu"):
    """Compare swiglu with the definition.

    shape: shape of the products without their last dimension, 2 * width. scale: factor on the products; a large one moves gates
    far from 0 on either side.
    """
    products = (torch.randn(*shape, 2 * width, device=device) * scale).to(dtype)
    upstream = torch.randn(*shape, width, device=device).to(dtype)
    inputs = [products, torch.rand(*shape, device=device)] if has_weights else [products]
    # The gradient of a row's weight is a sum whose terms cancel.
    size = (upstream.double() * eager_swiglu(products.double())).abs().sum(-1).max().item()
    names, scales = NAMES[: 1 + len(inputs)], (0.0, 0.0, size)[: 1 + len(inputs)]
    judge(names, swiglu, eager_swiglu, inputs, [upstream], scales=scales)


def compare(shape, width, dtype, device="cpu"):
    """Compare rms_norm and swiglu with their definitions, in every form."""
    compare_norm(shape, width, dtype, device=device)
    compare_norm(shape, width, dtype, step=3, is_zero_centred=True, scale=30.0, device=device)
    for step in (1, 3) if width % 2 == 0 else ():
        compare_norm(shape, width, dtype, step=step, is_rotated=True, device=device)
    for has_weights in (True, False):
        compare_swiglu(shape, width, dtype, has_weights=has_weights, device=device)
        # The exp of some of these gates overflows.
        compare_swiglu(shape, width, dtype, has_weights=has_weights, scale=60.0, device=device)


@pytest.mark.parametrize("implementation, dtype", TIERS, indirect=["implementation"])
@pytest.mark.parametrize("shape, width", SHAPES)
def test_row_ops_are_as_exact_as_plain_pytorch(shape, width, implementation, dtype):
    compare(shape, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape, width", [((4099,), 768), ((300, 1, 7), 128), ((7,), 33), ((1300,), 5120)])
def test_on_a_gpu(shape, width, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare(shape, width, dtype, "cuda")


def test_rows_of_zeros_and_of_large_numbers_are_finite():
    x = torch.tensor([[0.0, 0.0], [1e18, -1e18], [1e-20, 1e-20]], requires_grad=True)
    out = rms_norm(x, torch.ones(2), eps=EPS)
    torch.testing.assert_close(out, eager_norm(x.double(), torch.ones(2).double()).float())
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_gates_far_out_are_shut_or_open():
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 200.0, 1e30])
    products = torch.cat((gate, torch.ones(6))).requires_grad_()
    out = swiglu(products[None])[0]
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.0, 0.0, 200.0, 1e30]), atol=1e-8, rtol=1e-6)
    out.sum().backward()
    torch.testing.assert_close(products.grad[:6], torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0]), atol=1e-8, rtol=1e-6)


def test_a_nan_stays_in_its_row_and_reaches_the_weight_of_a_norm():
    x, weight = torch.randn(4, 10), torch.ones(10, requires_grad=True)
    x[2, 3] = torch.nan
    assert swiglu(x).isnan().any(1).tolist() == [False, False, True, False]
    out = rms_norm(x.requires_grad_(), weight, eps=EPS)
    out.sum().backward()
    assert out.isnan().any(1).tolist() == x.grad.isnan().any(1).tolist() == [False, False, True, False]
    assert weight.grad.isnan().all()


@pytest.mark.parametrize("ours, eager", [(lambda x, w: rms_norm(x, w, eps=EPS), eager_norm), (swiglu, eager_swiglu)])
def test_weight_gradients_keep_their_dtype_and_float64_works(ours, eager):
    x, weight = torch.randn(8, 8, dtype=BF16), torch.rand(8, requires_grad=True)
    out = ours(x, weight)
    out.sum().backward()  # the incoming gradient is an expanded tensor
    assert (out.dtype, weight.grad.dtype) == (BF16, FP32) and x.grad is None
    exactly = ours(x.double(), weight.detach().double())
    torch.testing.assert_close(exactly, eager(x.double(), weight.detach().double()))
