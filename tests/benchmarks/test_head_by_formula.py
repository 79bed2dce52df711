"""The head's bytes and FLOPs by formula, beside what the head holds and what docs/kernels.md says."""

import sys
from pathlib import Path

import pytest
from scripts import BENCHMARKS

from marsrl.kernels.head.chunked_head import DEVICE_GRADIENT_BYTES, DEVICE_LOGITS_BYTES
from marsrl.trainer.plan.hardware import GPUS

sys.path.insert(0, str(BENCHMARKS))
from head_by_formula import GRADIENT_ROWS, LOGITS_ROWS, HeadShape, head_phases, head_seconds

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
LARGE, H100 = HeadShape(16384, 2048, 151936), GPUS["h100-80g"]


def test_the_page_has_the_bytes_and_milliseconds_of_the_formula() -> None:
    text, phases = PAGE.read_text("utf-8"), head_phases(LARGE)
    assert f"{sum(phase.bytes for phase in phases) / 1e9:.1f} GB" in text
    assert f"{sum(phase.flops for phase in phases) / 1e12:.1f} TFLOP" in text
    assert f"{1e3 * head_seconds(LARGE, H100):.1f} ms" in text


def test_bytes_and_flops_of_a_row_by_hand() -> None:
    shape = HeadShape(tokens=1000, hidden=64, columns=5000, trained=0.5, active=0.25)
    first, rows, gradients, addition = head_phases(shape)
    assert first.flops + gradients.flops == (2 * 500 + 4 * 250) * 64 * 5000
    weight = 64 * 5000
    assert first.bytes == 2 * weight + 500 * (2 * 64 + 4 * 5000)  # one chunk: the weight, X, float32 logits
    assert rows.bytes == (500 * 4 + 250 * (4 + 2)) * 5000  # read for statistics; read again, dz in bfloat16
    assert gradients.bytes == 6 * weight + 250 * ((2 + 4) * 64 + 4 * 5000)  # W, dW; X, dX; dz twice
    assert addition.bytes == 12 * weight  # dW read, main_grad read and written


def test_a_chunk_has_as_many_rows_as_the_head_holds() -> None:
    assert DEVICE_LOGITS_BYTES // (4 * 151936 * 128) * 128 == LOGITS_ROWS
    assert DEVICE_GRADIENT_BYTES // (2 * 151936 * 128) * 128 == GRADIENT_ROWS


def test_it_is_not_below_the_floor_of_its_products() -> None:
    floor = 6 * 16384 * 2048 * 151936 / (H100.flops * 0.81)
    assert floor * 0.999 <= head_seconds(LARGE, H100) == pytest.approx(0.0477, abs=1e-4)
