"""The heads' own products, at production sizes, for GPUs that are not here."""

import pytest
import torch
import triton
from ahead_of_time import TARGETS, assert_compiled_well, compiled_launches

from marsrl.kernels.head.first_gemm.triton_impl import TritonFirstGemm
from marsrl.kernels.head.rows.protocol import Slopes, Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head

TOKENS, WIDTH = 65537, 151936
META = torch.device("meta")


def floats(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


def head_of(size, dtype, has_temperature=True):
    """Qwen's vocabulary with its padding."""
    return Head(
        op="op",
        weight=floats(WIDTH, size, dtype=dtype),
        targets=torch.empty(TOKENS, dtype=torch.int64, device=META),
        inverse_temperature=floats(TOKENS) if has_temperature else None,
        inverse_temperature_of_all=1.0,
        first_column=0,
        num_columns=151669,
        vocab_size=151669,
        tp_group=None,
    )


def assert_product_compiled_well(product, copies):
    """copies: two programs of 8 warps on a multiprocessor, in registers and in shared memory (1 KiB of each is reserved):
    while the epilogue of one takes exponentials and stores, the tensor cores work for the other."""
    # Triton 3.7.1 lays one register aside in the epilogue, once a tile, and takes it back there: none in the loop over H.
    spills = 8 if copies and not triton.__version__.startswith("3.6.") else 0
    assert_compiled_well(product, dots=True, spill_allowance_bytes=spills)
    assert bool(product.num_tile_loads) == copies, product
    if copies:
        assert product.registers * 32 * product.num_warps * 2 <= 65536, product
        assert (product.shared_bytes + 1024) * 2 <= 228 * 1024, product


# listed rows with a temperature each, whose exponentials are bfloat16; float32 ones of an entropy bonus
@pytest.mark.parametrize(
    "target, num_rows, dtype", [(80, 1536, torch.bfloat16), (90, 1536, torch.bfloat16), (90, 768, torch.float32)]
)
def test_a_chunk_to_exponentials_and_these_to_gradients(target, num_rows, dtype):
    head, gemm = head_of(2048, torch.bfloat16), TritonFirstGemm()
    rows = Rows(torch.empty(num_rows, dtype=torch.int64, device=META), 0, num_rows)
    statistics, out = Statistics(*(floats(TOKENS) for _ in range(4))), floats(num_rows, WIDTH, dtype=dtype)
    dz, active = floats(num_rows, WIDTH, dtype=torch.bfloat16), torch.empty(num_rows, dtype=torch.int64, device=META)
    with compiled_launches(target) as reports:
        product = gemm.multiply(None, floats(num_rows, 2048, dtype=torch.bfloat16), rows, head, out)
        gemm.statistics(product, rows, head, statistics)
        gemm.partials(product, rows, head)
        has_bonus = dtype == torch.float32
        gemm.gradients(product, rows, head, Slopes(statistics, floats(TOKENS), floats(TOKENS), has_bonus), dz, active)
    product, *others, gradients = reports
    names = ["finish_rows", "join_pieces", "list_active"]
    assert [report.kernel for report in others] == names and gradients.kernel == "exponential_gradients"
    assert product.kernel == ("first_product_by_copies" if target >= 90 else "first_product")
    assert_product_compiled_well(product, target >= 90)
    assert product.num_tile_stores or product.num_wide_stores, product
    for report in others:
        assert_compiled_well(report, dots=False)
    # ptxas lays one double of exact_exp on the stack, with few registers in use: not for lack of them.
    assert_compiled_well(gradients, dots=False, spill_allowance_bytes=8)
    assert bool(gradients.num_logarithms) == has_bonus, gradients
    assert gradients.registers <= 128 and gradients.num_wide_loads and gradients.num_wide_stores, gradients


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_at_once(target):
    statistics, rows = Statistics(*(floats(TOKENS) for _ in range(4))), Rows(None, 768, 4224)
    hidden, dz = floats(4224, 2048, dtype=torch.bfloat16), floats(4224, WIDTH, dtype=torch.bfloat16)
    with compiled_launches(target) as (reports):
        slopes = Slopes(statistics, floats(TOKENS), floats(TOKENS))
        TritonFirstGemm().gradients_at_once(hidden, rows, head_of(2048, torch.bfloat16), slopes, dz)
    (product,) = reports
    assert_product_compiled_well(product, target >= 90)
    assert product.num_tile_stores or product.num_wide_stores, product


# an H that no step divides: whole units of 16 bytes, and not; few rows
@pytest.mark.parametrize(
    "target, num_rows, size", [(80, 3456, 1008), (90, 3456, 1008), (90, 3456, 1001), (90, 48, 2048)]
)
def test_statistics_alone(target, num_rows, size):
    head, rows = head_of(size, torch.float16, has_temperature=False), Rows(None, 0, num_rows)
    with compiled_launches(target) as reports:
        hidden = floats(num_rows, size, dtype=torch.float16)
        TritonFirstGemm().multiply(None, hidden, rows, head, hidden[:, :0])
    assert_product_compiled_well(reports[0], target >= 90 and size % 8 == 0)
