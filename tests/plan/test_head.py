"""The table of docs/kernels.md is what the formulas say."""

from pathlib import Path

import pytest

from marsrl.kernels.head.chunked_head import DEVICE_GRADIENT_BYTES, DEVICE_LOGITS_BYTES
from marsrl.trainer.plan.hardware import GPUS
from marsrl.trainer.plan.head import (
    DESIGNS,
    EXPONENTIALS,
    PRESENT,
    HeadShape,
    designs_table,
    head_phases,
    head_seconds,
)

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_page_has_the_table_of_the_designs() -> None:
    assert designs_table() in PAGE.read_text("utf-8")


def test_bytes_and_flops_of_a_row_by_hand() -> None:
    shape = HeadShape(tokens=1000, hidden=64, columns=5000, trained=0.5, active=0.25)
    first, rows, gradients, addition = head_phases(shape, PRESENT)
    assert first.flops + gradients.flops == (2 * 500 + 4 * 250) * 64 * 5000
    weight = 64 * 5000
    assert first.bytes == 2 * weight + 500 * (2 * 64 + 4 * 5000)  # one chunk: the weight, X, float32 logits
    assert rows.bytes == (500 * 4 + 250 * (4 + 2)) * 5000  # read for statistics; read again, dz in bfloat16
    assert gradients.bytes == 6 * weight + 250 * ((2 + 4) * 64 + 4 * 5000)  # W, dW; X, dX; dz twice
    assert addition.bytes == 12 * weight  # dW read, main_grad read and written
    assert [design.before_gradients for design in DESIGNS] == [14, 6]


def test_a_chunk_has_as_many_rows_as_the_head_holds() -> None:
    gradients = [DEVICE_GRADIENT_BYTES // (2 * 151936 * 128) * 128]
    of_logits, of_exponentials = (DEVICE_LOGITS_BYTES // (itemsize * 151936) // 128 * 128 for itemsize in (4, 2))
    assert [(design.first_rows, design.gradient_rows) for design in DESIGNS] == [
        (of_logits, *gradients),
        (of_exponentials, *gradients),
    ]


def test_no_design_is_below_the_floor_of_its_products() -> None:
    shape, gpu = HeadShape(16384, 2048, 151936), GPUS["h100-80g"]
    floor = 6 * 16384 * 2048 * 151936 / (gpu.flops * 0.81)
    assert min(head_seconds(shape, design, gpu) for design in DESIGNS) >= floor * 0.999


def test_our_own_first_product_has_no_share_of_the_peak_that_only_cublas_has_shown() -> None:
    shape, gpu = HeadShape(16384, 2048, 151936), GPUS["h100-80g"]
    flops = 2 * 16384 * 2048 * 151936
    first, *others = head_phases(shape, EXPONENTIALS)
    assert first.seconds(gpu) == pytest.approx(flops / (0.51 * 989e12), rel=2e-3)
    assert {phase.share for phase in [*others, *head_phases(shape, PRESENT)]} == {0.81}
    assert 1e3 * head_seconds(shape, EXPONENTIALS, gpu) == pytest.approx(50.2, abs=0.1)
