"""The output head by formula: FLOPs, bytes and seconds of the fused loss.

python benchmarks/head_by_formula.py        # expected milliseconds

T tokens, H hidden, V columns of a rank (the vocabulary over its tensor-parallel ranks); m: share of the tokens that are
trained, a: share that has a gradient. Nothing here was timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.speed import head_flops

PRODUCT_SHARE = (
    0.81  # of the peak, cuBLAS, a large bf16 product: measured on one H100 (hardware.py); taken for the others too
)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """tokens T, hidden H, columns V of this rank; trained m and active a, shares of the tokens."""

    tokens: int
    hidden: int
    columns: int
    trained: float = 1.0
    active: float = 1.0


# Bytes that pass through memory for a logit of a row, each once: float32 logits are written, read for the statistics, and read
# for dz, which is written in bfloat16 and read by the products of dX and dW.
LOGITS_BYTES, STATISTICS_BYTES, GRADIENT_BYTES, PRODUCTS_BYTES = 4, 4, 6, 4
# Rows of a chunk of logits and of dz at V = 151936: the products of each read the weight, and those of dz read and write dW.
LOGITS_ROWS, GRADIENT_ROWS = 768, 4224


@dataclass(frozen=True, slots=True)
class Phase:
    """Work that is done before the next begins: FLOPs on tensor cores, bytes through memory."""

    flops: float
    bytes: float

    def seconds(self, gpu: hw.Gpu) -> float:
        return max(self.flops / (gpu.flops * PRODUCT_SHARE), self.bytes / (gpu.bandwidth * hw.MEMORY_SHARE.value))


def head_phases(shape: HeadShape) -> tuple[Phase, Phase, Phase, Phase]:
    """The first product, the row kernels, the products of dX and dW, the addition of dW to main_grad in the backward; weight
    and hidden states in bfloat16, dW in float32."""
    trained, active = shape.tokens * shape.trained, shape.tokens * shape.active
    weight = shape.columns * shape.hidden
    first = 2 * weight * ceil(trained / LOGITS_ROWS) + 2 * trained * shape.hidden
    first += LOGITS_BYTES * trained * shape.columns
    rows = (STATISTICS_BYTES * trained + GRADIENT_BYTES * active) * shape.columns
    gradients: float = ((2 + 8) * ceil(active / GRADIENT_ROWS) - 4) * weight  # the first product of dW only writes it
    gradients += (2 + 4) * active * shape.hidden
    gradients += PRODUCTS_BYTES * active * shape.columns
    return (
        Phase(head_flops(trained, 0, shape.hidden, shape.columns), first),
        Phase(0, rows),
        Phase(head_flops(0, active, shape.hidden, shape.columns), gradients),
        Phase(0, (4 + 8) * weight),
    )


def head_seconds(shape: HeadShape, gpu: hw.Gpu) -> float:
    """Seconds of forward and backward, the phases one after the other; collectives of a sharded vocabulary are not counted."""
    return sum(phase.seconds(gpu) for phase in head_phases(shape))


HIDDEN = 2048
VOCABULARIES = (32000, 151936)
TOKENS = (4096, 16384, 65536)
MASKED = (0.0, 0.5, 0.75)
MACHINES = ("h100-80g", "h200-141g", "a100-80g")


def times_table() -> str:
    """Expected milliseconds of the head, as Markdown."""
    heads = [f"{tokens // 1024}k, {masked:.0%}" for tokens in TOKENS for masked in MASKED]
    lines = [_row("GPU", "V", "TP", *heads), _rule(3 + len(heads))]
    for name in MACHINES:
        for vocabulary in VOCABULARIES:
            for tensor in (1, 4):
                shapes = (
                    HeadShape(tokens, HIDDEN, vocabulary // tensor, 1 - masked, 1 - masked)
                    for tokens in TOKENS
                    for masked in MASKED
                )
                found = (f"{1e3 * head_seconds(shape, hw.GPUS[name]):.2f}" for shape in shapes)
                lines.append(_row(name, f"{vocabulary:,}", tensor, *found))
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(count: int) -> str:
    return "|" + "---|" * count


if __name__ == "__main__":
    print(times_table())
