"""grouped_linear against autograd in float64; again in interpreter/test_ops.py."""

import pytest
import torch
from grouped_linear_cases import check_without_rows, compare


@pytest.fixture(params=["cpu", "reference"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)


# ends inside of a tile and at its end, experts without rows; K and N that no tile divides
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 7], [0, 5, 0], [0, 0, 0], [4, 4, 4], [5, 0, 3, 12, 0]])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_each_expert_sees_its_own_rows(counts, dtype, as_tensor, implementation):
    compare(counts, 10, 5, dtype, given=torch.tensor(counts) if as_tensor else counts)


def test_no_rows_and_no_expert(implementation):
    check_without_rows()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("on_device", [True, False])
def test_on_a_gpu(implementation, dtype, on_device, monkeypatch):
    if implementation == "torch" and (dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] < 9):
        pytest.skip("torch._grouped_mm takes bfloat16 on Hopper")
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    counts = [300, 0, 1, 128, 0, 907, 64, 5]
    given = torch.tensor(counts, device="cuda") if on_device else counts
    compare(counts, 2048, 768, dtype, given=given, device="cuda")
