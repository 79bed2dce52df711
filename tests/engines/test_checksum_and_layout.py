"""About two seconds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marsrl.kernels import library
from marsrl.rollout.weights.checksum import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]


@pytest.fixture(params=["csrc/cpu", "torch"])
def implementation(request, monkeypatch):
    """Both forms of the sum; that of PyTorch is what runs on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(library, "why_no_cpu_library", lambda: "left out by the test")
    elif reason := library.why_no_cpu_library():
        pytest.skip(reason)


def made_up(count, dtype, seed):
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_seen(implementation, data):
    values = made_up(data.draw(st.integers(1, 300)), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 99)))
    bit = data.draw(st.integers(0, values.nbytes * 8 - 1))
    flipped = values.clone()
    flipped.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum(flipped) != checksum(values) == checksum(values.clone())


def test_the_checksum_is_this_number(implementation):
    """A fixed value: trainer and engine may run different releases, on different devices."""
    assert checksum(torch.arange(50001, dtype=torch.float32)) == 0xCA9367CC560C9C96
    assert checksum(torch.arange(10, dtype=torch.bfloat16).view(2, 5)) == 0x222E2134B4438719


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_the_checksum_of_the_cpu():
    values = made_up(100_003, torch.bfloat16, 3)
    assert checksum(values.cuda()) == checksum(values)
