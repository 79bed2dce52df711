"""First product of a head by QuACK's GEMM for Hopper (CuTe DSL), which writes exponentials instead of logits. Imports QuACK.

    exponentials[r, v] = e^(z - m_r)      z: logit / temperature; m_r: close to the target's z

bfloat16 has the exponent range of float32, so no precision is lost as long as m_r is within 69 of the row's largest z. QuACK's
own loss (quack/linear_cross_entropy.py) instead uses a different m for every 128 columns of a row, and corrects for this by
scaling an operand of the other two products.
"""

# mypy: ignore-errors
# QuACK has no types, and its DSL parses the source of _exponentials.

import math

from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pexp2
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect
from torch import Tensor

TILE = 128  # columns of a partial sum; V = 151,936 is no multiple of 192 or 256
LOG2_E = 1 / math.log(2)

_target = ColVecLoad("target")


@gemm_epilogue(
    ops={"inverse": ColVecLoad("inverse"), "offset": ColVecLoad("offset")},
    reduces={"total": ColVecReduce("total"), "weighted": ColVecReduce("weighted", scaled=True)},
    outs={"target_logit": ColVecSelect("target_logit", idx_op=_target)},
    extra_ops=(_target,),
)
def _exponentials(acc, inverse, offset):
    z = acc * inverse
    d = z - offset
    e = pexp2(d * LOG2_E)
    return {"D": e, "total": e, "weighted": (d, e), "target_logit": z}


def exponentials(
    hidden: Tensor,
    weight: Tensor,
    inverse_temperature: Tensor,
    offsets: Tensor,
    targets: Tensor,
    out: Tensor,
    totals: Tensor,
    weighted: Tensor,
    target_logits: Tensor,
) -> None:
    """Compute e^d with d = z - m, and its sums per row and tile.

    hidden: [R, H] bfloat16. weight: [V, H] bfloat16.
    inverse_temperature, offsets: [R] float32; offsets has m.
    targets: [R] int64.
    out: [R, V] bfloat16, receives e^d.
    totals, weighted: [R, V / TILE] float32, receive the sums of e^d and of d e^d.
    target_logits: [R] float32, receives z of the target. It stays unchanged where the target is outside 0 .. V - 1.
    """
    _exponentials.gemm(
        hidden,
        weight,
        out,
        epi_args={
            "inverse": inverse_temperature.unsqueeze(0),
            "offset": offsets.unsqueeze(0),
            "total": totals,
            "weighted": weighted,
            "target": targets,
            "target_logit": target_logits,
        },
        tile_M=128,
        tile_N=TILE,
        cluster_M=2,
        cluster_N=1,
        pingpong=True,
    )
