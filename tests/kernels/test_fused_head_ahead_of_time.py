"""The fused head's Triton kernels, compiled at production sizes and constants for GPUs that this machine does not have."""

import pytest
import quack_in_torch
import torch
from ahead_of_time import TARGETS, compile_well, floats, ints
from policy_cases import OBJECTIVES

from marsrl.kernels.head.objective import PolicyTokens
from marsrl.kernels.head.rows.protocol import Slopes, Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.rows.triton_impl import TritonRowKernels
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.policy_loss.terms import policy_terms

pytestmark = pytest.mark.slow

ROWS, TOKENS = 768, 65537


def head_of(width, columns, has_temperature):
    return Head(
        op="op",
        weight=floats(width, 2048, dtype=torch.bfloat16),
        targets=ints(TOKENS),
        inverse_temperature=floats(TOKENS) if has_temperature else None,
        inverse_temperature_of_all=1.0,
        first_column=0,
        num_columns=columns,
        vocab_size=columns,
        tp_group=None,
    )


# Qwen's vocabulary with listed rows and a temperature per token; an odd one with contiguous rows; GPT-2's 50,257 columns in the
# head's buffer rows of 50,272.
@pytest.mark.parametrize(
    "target, width, stride, columns, is_listed, dtype",
    [
        *((target, 151936, 151936, 151669, True, torch.bfloat16) for target in TARGETS),
        (90, 152063, 152063, 152063, False, torch.float32),
        (80, 50257, 50272, 50257, False, torch.bfloat16),
    ],
)
def test_statistics_and_gradients_of_a_chunk(target, width, stride, columns, is_listed, dtype):
    head, kernels = head_of(width, columns, is_listed), TritonRowKernels()
    rows = Rows(ints(ROWS), 0, ROWS) if is_listed else Rows(None, 768, ROWS)
    statistics = Statistics(*(floats(TOKENS) for _ in range(4)))
    logits, dz = floats(ROWS, stride)[:, :width], floats(ROWS, stride, dtype=dtype)[:, :width]
    names = ["row_partials", "finish_rows", "row_partials", "join_pieces", "list_active", "row_gradients"]
    with compile_well(target, names) as reports:
        kernels.statistics(logits, rows, head, statistics)
        kernels.partials(logits, rows, head)
        kernels.gradients(logits, rows, head, Slopes(statistics, floats(TOKENS), floats(TOKENS)), dz, ints(ROWS))
    # Two programs of 8 warps must fit on a multiprocessor, so that one computes while the other waits for memory.
    assert max(report.registers for report in reports) <= 128, reports
    if stride % 16 == 0:
        by_kernel = {report.kernel: report for report in reports}
        assert by_kernel["row_partials"].num_wide_loads and by_kernel["row_gradients"].num_wide_loads, by_kernel
        assert by_kernel["row_gradients"].num_wide_stores, by_kernel


@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_around_the_product_of_quack(is_packed, monkeypatch):
    quack_in_torch.install(monkeypatch)
    from marsrl.kernels.linear_policy_loss.quack_head import gradients

    monkeypatch.setattr(gradients.gemms, "exponentials", lambda *tensors: None)
    head, rows = head_of(151936, 151936, is_packed), Rows(ints(4224), 0, 4224) if is_packed else Rows(None, 4224, 4224)
    slopes = Slopes(Statistics(*(floats(TOKENS) for _ in range(4))), floats(TOKENS), floats(TOKENS))
    exponentials = floats(4224, 151936, dtype=torch.bfloat16)
    of_rows = floats(2048, 151936, dtype=torch.bfloat16) if is_packed else exponentials
    places, v = floats(4224, dtype=torch.int32), floats(of_rows.shape[0])
    with compile_well(90, ["row_offsets", "finish_rows", "prepare_rows"]):
        product = gradients.Product(head, floats(TOKENS, 2048, dtype=torch.bfloat16), rows, exponentials)
        product.fill_rest(exponentials[:0])
        gradients.finish(head, rows, slopes.statistics, product, floats(1, dtype=torch.int32))
        gradients.prepare(head, rows, slopes, exponentials, places, of_rows, v)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["clip higher, dual clip", "sequence ratio", "k3, entropy bonus, tis"])
def test_the_terms_of_a_chunk(target, name):
    objective, is_off_policy = OBJECTIVES[name]
    tokens = PolicyTokens(
        objective=objective,
        advantages=floats(TOKENS),
        mask=floats(TOKENS, dtype=torch.bool),
        cu_seqlens=ints(41),
        sequence_of=ints(TOKENS),
        agent_of=ints(TOKENS),
        num_agents=5,
        gate=floats(TOKENS, dtype=torch.bool),
        old_logprobs=floats(TOKENS) if is_off_policy else None,
        rollout_logprobs=floats(TOKENS) if objective.correction != "none" else None,
        reference_logprobs=floats(TOKENS) if objective.kl != "none" else None,
        normaliser=4096.0,
        weights=floats(TOKENS) if name == "sequence ratio" else None,
    )
    with compile_well(target, ["policy_terms"]):
        terms = policy_terms(TritonRowKernels(), tokens, floats(TOKENS), floats(TOKENS))
        terms.evaluate(Rows(ints(ROWS), 0, ROWS))
