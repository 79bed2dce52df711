"""The output head by formula: FLOPs, bytes and seconds of the fused loss as it is, and of the design that is taken by name.

python -m marsrl.trainer.plan.head        # the table of docs/kernels.md, and expected milliseconds

T tokens, H hidden, V columns of a rank (the vocabulary over its tensor-parallel ranks); m: share of the tokens that are
trained, a: share that has a gradient. Nothing here was timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from marsrl.trainer.plan import hardware as hw

PRODUCT_SHARE = (
    0.81  # of the peak, cuBLAS, a large bf16 product: measured on one H100 (hardware.py); taken for the others too
)
TRITON_SHARE = 0.51
"""Share of the peak of a product in Triton on Hopper, not measured by us: 502 of 989 TFLOP/s at 65,536 x 1,024 x 1,024 by a
kernel with TMA loads, where cuBLAS reaches 583 (github.com/facebookexperimental/triton, pull request 1038). Its epilogue waits
for its products; the same kernel made persistent, which hides that, is at 564."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """tokens T, hidden H, columns V of this rank; trained m and active a, shares of the tokens."""

    tokens: int
    hidden: int
    columns: int
    trained: float = 1.0
    active: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadDesign:
    """Bytes that pass through memory for a logit of a row, each once.

    first: written by the first product, of a trained row. rows: by the row kernels, of a trained row. gradient: by the row
    kernels, of an active row. products: read by the products of dX and dW, of an active row.
    first_rows, gradient_rows: of a chunk, each of which reads the weight, and of the second kind reads and writes dW.
    first_share: share of the peak that the first product reaches; the others are cuBLAS's in every design.
    """

    name: str
    first: int
    rows: int
    gradient: int
    products: int
    first_rows: int
    gradient_rows: int
    first_share: float = PRODUCT_SHARE

    @property
    def before_gradients(self) -> int:
        """Bytes a logit of a row that is trained and active, before the products of dX and dW."""
        return self.first + self.rows + self.gradient


# (a) float32 logits: written, read for the statistics, read for dz, which is bfloat16.
# (d) bfloat16 exponentials relative to their tile's reference, written by the first product beside float32 statistics,
#     become dz in the buffer where it waits: MARSRL_KERNELS=linear_policy_loss=triton_gemm, without an entropy bonus.
# Both hold as many bytes: 4,224 rows of 2 bytes of dz, and 768 of 4 of logits or 1,536 of 2 of exponentials.
PRESENT = HeadDesign("(a) as it is", 4, 4, 6, 4, 768, 4224)
EXPONENTIALS = HeadDesign("(d) exponentials", 2, 0, 4, 4, 1536, 4224, TRITON_SHARE)
DESIGNS = (PRESENT, EXPONENTIALS)


def head_flops(trained_rows: float, active_rows: float, hidden: int, columns: int) -> float:
    """(2 m + 4 a) T H V: logits of the trained rows, dX and dW of the active ones."""
    return (2 * trained_rows + 4 * active_rows) * hidden * columns


@dataclass(frozen=True, slots=True)
class Phase:
    """Work that is done before the next begins: FLOPs on tensor cores at a share of their peak, bytes through memory."""

    flops: float
    bytes: float
    share: float = PRODUCT_SHARE

    def seconds(self, gpu: hw.Gpu) -> float:
        return max(self.flops / (gpu.flops * self.share), self.bytes / (gpu.bandwidth * hw.MEMORY_SHARE.value))


def head_phases(shape: HeadShape, design: HeadDesign) -> tuple[Phase, Phase, Phase, Phase]:
    """The first product, the row kernels, the products of dX and dW, the addition of dW to main_grad in the backward; weight
    and hidden states in bfloat16, dW in float32."""
    trained, active = shape.tokens * shape.trained, shape.tokens * shape.active
    weight = shape.columns * shape.hidden
    first = 2 * weight * ceil(trained / design.first_rows) + 2 * trained * shape.hidden
    first += design.first * trained * shape.columns
    rows = (design.rows * trained + design.gradient * active) * shape.columns
    gradients: float = (
        (2 + 8) * ceil(active / design.gradient_rows) - 4
    ) * weight  # the first product of dW only writes it
    gradients += (2 + 4) * active * shape.hidden
    gradients += design.products * active * shape.columns
    return (
        Phase(head_flops(trained, 0, shape.hidden, shape.columns), first, design.first_share),
        Phase(0, rows),
        Phase(head_flops(0, active, shape.hidden, shape.columns), gradients),
        Phase(0, (4 + 8) * weight),
    )


def head_seconds(shape: HeadShape, design: HeadDesign, gpu: hw.Gpu) -> float:
    """Seconds of forward and backward, the phases one after the other; collectives of a sharded vocabulary are not counted."""
    return sum(phase.seconds(gpu) for phase in head_phases(shape, design))


HIDDEN = 2048
VOCABULARIES = (32000, 151936)
TOKENS = (4096, 16384, 65536)
MASKED = (0.0, 0.5, 0.75)
MACHINES = ("h100-80g", "h200-141g", "a100-80g")


def designs_table() -> str:
    """Bytes of the designs, and their milliseconds on an H100, as Markdown."""
    shape = HeadShape(16384, HIDDEN, 151936)
    lines = [_row("design", "bytes a logit before dX, dW", "with them", "GB in all", "TFLOP", "ms, H100"), _rule(6)]
    for design in DESIGNS:
        phases = head_phases(shape, design)
        before = design.before_gradients
        numbers = (sum(phase.bytes for phase in phases) / 1e9, sum(phase.flops for phase in phases) / 1e12)
        ms = 1e3 * head_seconds(shape, design, hw.GPUS["h100-80g"])
        lines.append(
            _row(design.name, before, before + design.products, *(f"{each:.1f}" for each in numbers), f"{ms:.1f}")
        )
    return "\n".join(lines)


def times_table() -> str:
    """Expected milliseconds of the head as it is, as Markdown."""
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
                found = (f"{1e3 * head_seconds(shape, PRESENT, hw.GPUS[name]):.2f}" for shape in shapes)
                lines.append(_row(name, f"{vocabulary:,}", tensor, *found))
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(count: int) -> str:
    return "|" + "---|" * count


if __name__ == "__main__":
    print(f"{designs_table()}\n\n{times_table()}")
