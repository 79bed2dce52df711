"""The choice of an implementation, and the error if none can serve."""

import subprocess

import pytest
import torch

from marsrl.kernels import explain, library, linear_logprob
from marsrl.kernels.dispatch import Implementation, Op


@pytest.mark.parametrize(
    ("forced", "dtype", "has_device", "error", "says"),
    [
        ("cpu", torch.float64, False, RuntimeError, "cpu cannot serve this call of linear_logprob: hidden is float64"),
        ("tritn", torch.float32, False, ValueError, "'tritn': expected one of cpu, .*reference"),
        ("triton", torch.float32, False, RuntimeError, "triton .* PyTorch sees no CUDA device .TRITON_INTERPRET=1"),
        ("triton", torch.float32, True, RuntimeError, "hidden is on cpu, Triton kernels read CUDA memory"),
    ],
)
def test_a_forced_implementation_names_why_it_cannot_serve(forced, dtype, has_device, error, says, monkeypatch):
    arguments = torch.randn(4, 8, dtype=dtype), torch.randn(16, 8, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    monkeypatch.setenv("MARSRL_KERNELS", forced)
    with pytest.raises(error, match=f"MARSRL_KERNELS=.*{says}"):
        linear_logprob(*arguments)
    monkeypatch.delenv("MARSRL_KERNELS")
    linear_logprob(*arguments)  # served by csrc/cpu, or by the reference


def test_one_op_can_be_forced_and_the_others_choose(monkeypatch):
    monkeypatch.setattr("marsrl.kernels.dispatch._OPS", {})
    both = Implementation("a", lambda: "a"), Implementation("b", lambda: "b")
    first, second = Op("first", both), Op("second", both)
    monkeypatch.setenv("MARSRL_KERNELS", "second=b")
    assert (first(), second()) == ("a", "b")
    assert {each.op: (each.chosen, each.reasons) for each in explain()} == {
        "first": ("a", {"b": "a is preferred"}),
        "second": ("b", {"a": "MARSRL_KERNELS=second=b"}),
    }
    monkeypatch.setenv("MARSRL_KERNELS", "first=b, second=a")
    assert (first(), second()) == ("b", "a")
    monkeypatch.setenv("MARSRL_KERNELS", "second=c")
    with pytest.raises(ValueError, match="MARSRL_KERNELS='second=c' has 'c': expected one of a, b"):
        first()
    monkeypatch.setenv("MARSRL_KERNELS", "third=a")
    with pytest.raises(ValueError, match="MARSRL_KERNELS='third=a' has 'third': expected one of first, second"):
        first()


def test_without_a_gpu_the_library_serves_and_triton_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {each.op: each for each in explain()}
    assert {found[op].chosen for op in ("linear_policy_loss", "sequence_sums", "group_advantage")} == {"cpu"}
    assert "PyTorch sees no CUDA device" in found["linear_policy_loss"].reasons["triton"]


def test_a_missing_broken_or_old_library_is_reported(tmp_path):
    assert "is missing: build it with" in library.open_library(tmp_path / "none.so", {})
    (tmp_path / "broken.so").write_text("not a library")
    assert "cannot be loaded" in library.open_library(tmp_path / "broken.so", {})
    (tmp_path / "old.c").write_text("int marsrl_abi_version(void) { return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "old.so", tmp_path / "old.c"], check=True)
    message = f"interface version 0, this package needs {library.ABI_VERSION}: build it again"
    assert message in library.open_library(tmp_path / "old.so", {})
