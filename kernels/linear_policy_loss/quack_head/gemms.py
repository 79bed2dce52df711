"""The three products of a head by QuACK's GEMMs for Hopper (CuTe DSL), with exponentials in place of logits. Imports QuACK.

    exponentials[r, v] = 2^(z log2(e) - k)      k: the largest z of the row's tile of TILE columns, in log2 and rounded
    dz[r, v] = v_r u[r, v's tile] exponentials[r, v]          u = 2^(k - largest k of the row), a power of two: exact

dz is never in memory: u is applied on the way to the tensor cores, v_r to the rows of dX and of the other factor of dW.
This is the scaled-exp design of quack/linear_cross_entropy.py; the entropy's sum and a token's temperature are ours.
"""

# mypy: ignore-errors
# The DSL reads these functions; they have no types of its own.

import math

from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.library import identity_epi
from quack.epilogue.math import pexp2
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect
from quack.epilogue.scaled_exp import MaxLog2
from quack.operand_transform import a_transform
from quack.operand_transform.host import transform_a_operand
from torch import Tensor

TILE = 128  # columns that share a k; V = 151,936 is no multiple of 192 or 256
LOG2_E = 1 / math.log(2)
# Tiles of dX and dW: 128 by 256, K 64, in clusters of two, as QuACK has them.
_BACKWARD = {"tile_M": 128, "tile_N": 256, "tile_K": 64}

_maxima = MaxLog2("max_log2")
_target = ColVecLoad("target")


def _scaled(acc, inverse):
    return {"max_log2": acc * inverse}


@gemm_epilogue(
    ops={"max_log2": _maxima, "inverse": ColVecLoad("inverse")},
    prepass=_scaled,
    prepass_outs=("max_log2",),
    reduces={"total": ColVecReduce("total"), "weighted": ColVecReduce("weighted", scaled=True)},
    outs={"target_logit": ColVecSelect("target_logit", idx_op=_target)},
    extra_ops=(_maxima.out("max_log2_out"), _target),
)
def _exponentials(acc, max_log2, inverse):
    z = acc * inverse
    d = z * LOG2_E - max_log2
    e = pexp2(d)
    return {"D": e, "total": e, "weighted": (d, e), "target_logit": z}


@gemm_epilogue(ops={"v": ColVecLoad("v")})
def _times_row(acc, v):
    return {"D": acc * v}


@a_transform(vec_size=8, args={"u": "colvec_ktile"})
def _times_tile(x, u):
    return x * u


@a_transform(vec_size=8, args={"u": "kvec_m64"})
def _times_tile_of_transposed(x, u):
    return x * u


def exponentials(
    hidden: Tensor,
    weight: Tensor,
    inverse_temperature: Tensor,
    targets: Tensor,
    out: Tensor,
    maxima: Tensor,
    totals: Tensor,
    weighted: Tensor,
    target_logits: Tensor,
) -> None:
    """out [R, V] bfloat16 and, of each row and tile [R, V / TILE] float32: k, sum e^d, sum d log2(e) e^d with d = z - k ln 2.

    hidden [R, H], weight [V, H] bfloat16; inverse_temperature [R] float32; targets [R] int64. target_logits [R] float32: z of
    the target, untouched where the target is not in 0 .. V - 1.
    """
    _exponentials.gemm(
        hidden,
        weight,
        out,
        epi_args={
            "max_log2": TILE,
            "inverse": inverse_temperature.unsqueeze(0),
            "total": totals,
            "weighted": weighted,
            "max_log2_out": maxima,
            "target": targets,
            "target_logit": target_logits,
        },
        tile_M=128,
        tile_N=TILE,
        cluster_M=2,
        cluster_N=1,
        pingpong=True,
    )


def hidden_gradient(exponentials: Tensor, scales: Tensor, v: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [n, H] = v [n] float32 * (u * exponentials [n, V]) @ weight; scales: u of 64 columns each, [V / 64, n] bfloat16."""
    left = transform_a_operand(_times_tile, exponentials, {"u": scales}, 128, 64)
    words = {"transform_a": _times_tile, "cluster_M": 2, "cluster_N": 1, **_BACKWARD}
    _times_row.gemm(left, weight.mT, out, epi_args={"v": v.unsqueeze(0)}, **words)


def weight_gradient(exponentials: Tensor, scales: Tensor, scaled_hidden: Tensor, out: Tensor, adds: bool) -> None:
    """out [V, H] float32 = (u * exponentials [n, V]).T @ scaled_hidden [n, H] bfloat16, v * hidden; adds: to what is there, by a
    reduction in the memory that touches each element once."""
    left = transform_a_operand(_times_tile_of_transposed, exponentials.t(), {"u": scales}, 128, 64)
    words = {"transform_a": _times_tile_of_transposed, "cluster_M": 1, "cluster_N": 2, **_BACKWARD}
    identity_epi.gemm(left, scaled_hidden.mT, out, epi_args={}, add_to_output=adds, **words)
