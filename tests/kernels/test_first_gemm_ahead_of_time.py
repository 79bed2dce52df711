"""The first GEMM with its statistics, at production sizes, for GPUs that are not here."""

import pytest
import torch
from ahead_of_time import TARGETS, assert_compiled_well, compiled_launches

from marsrl.kernels.head.first_gemm.triton_impl import TritonFirstGemm
from marsrl.kernels.head.rows.protocol import Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head

TOKENS, WIDTH = 65537, 151936
META = torch.device("meta")


def floats(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


# Qwen's vocabulary with its padding, listed rows, a temperature for each token, logits wanted; statistics alone of a few
# neighbouring rows, an H that no step divides
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "num_rows, size, dtype, has_logits", [(768, 2048, torch.bfloat16, True), (3456, 1008, torch.float16, False)]
)
def test_logits_and_statistics_of_a_chunk(target, num_rows, size, dtype, has_logits):
    head = Head(
        op="op",
        weight=floats(WIDTH, size, dtype=dtype),
        targets=torch.empty(TOKENS, dtype=torch.int64, device=META),
        inverse_temperature=floats(TOKENS) if has_logits else None,
        inverse_temperature_of_all=1.0,
        first_column=0,
        num_columns=151669,
        vocab_size=151669,
        tp_group=None,
    )
    ids = torch.empty(num_rows, dtype=torch.int64, device=META) if has_logits else None
    rows, gemm = Rows(ids, 0, num_rows), TritonFirstGemm()
    with compiled_launches(target) as reports:
        out = floats(num_rows, WIDTH) if has_logits else None
        pieces = gemm.logits(floats(num_rows, size, dtype=dtype), rows, head, out)
        if has_logits:
            gemm.statistics(pieces, rows, head, Statistics(*(floats(TOKENS) for _ in range(4))))
            gemm.partials(pieces, rows, head)
    assert [report.kernel for report in reports] == ["logits_and_pieces", "finish_rows", "join_pieces"][: len(reports)]
    product, *joins = reports
    assert_compiled_well(product, dots=True)
    if target >= 90:
        # Two programs of 8 warps on a multiprocessor, in registers and in shared memory (1 KiB of each is reserved):
        # while the epilogue of one takes exponentials and stores, the tensor cores work for the other.
        assert product.registers * 32 * product.num_warps * 2 <= 65536, product
        assert (product.shared_bytes + 1024) * 2 <= 228 * 1024, product
    for report in joins:
        assert_compiled_well(report, dots=False)
