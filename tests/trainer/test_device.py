"""A GPU that PyTorch does not see is refused with the reason, and the CPU is used where it is asked for."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from marsrl.trainer.checks import device
from marsrl.trainer.checks.device import Device, why_not_device
from marsrl.trainer.commands.cli import main

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="this is about machines on which PyTorch sees no GPU"
)

CPU_BUILD = "is a build for CPUs (`MARSRL_DEVICE=cuda make install`"
NO_DRIVER = "no NVIDIA driver is found"
OLD = "the NVIDIA driver is 570.86.15, and CUDA 13.0 needs 580 or newer"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes this one a machine with that driver and that PyTorch.

    driver: as nvidia-smi says. module: as the kernel says, also to containers without its GPUs. build: torch.version.cuda.
    """

    def make(
        driver: str | None = None, module: str | None = None, build: str | None = None, seen: bool = False
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.setattr(device, "KERNEL_MODULE", tmp_path / "version")
        if driver is not None:
            (tmp_path / "bin").mkdir(exist_ok=True)
            (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
            (tmp_path / "bin/nvidia-smi").chmod(0o755)
        if module is not None:
            (tmp_path / "version").write_text(
                f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {module}  Release\n"
            )
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)

    for name in ("MARSRL_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return make


def test_without_a_driver_only_a_run_for_gpus_is_refused(machine: Callable[..., None]) -> None:
    machine()
    assert why_not_device() is None and why_not_device("cpu") is None
    reason = why_not_device("cuda") or ""
    assert CPU_BUILD in reason and NO_DRIVER in reason and "set MARSRL_DEVICE=cpu or run.device=cpu" in reason
    machine(build="13.0")  # a login node
    assert why_not_device() is None
    reason = why_not_device("cuda") or ""
    assert NO_DRIVER in reason and CPU_BUILD not in reason


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_driver_without_a_pytorch_that_sees_gpus_is_refused_with_the_reason(
    asked: Device, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("580.65.06")
    reason = why_not_device(asked) or ""
    assert "an NVIDIA driver (580.65.06) is here" in reason and CPU_BUILD in reason and "needs" not in reason
    machine("570.86.15", build="13.0")
    reason = why_not_device(asked) or ""
    assert OLD in reason and CPU_BUILD not in reason
    machine("570.86.15")  # what is to be done before and after the install
    reason = why_not_device(asked) or ""
    assert OLD in reason and CPU_BUILD in reason
    machine("535.183.01", build="12.6")  # new enough for that
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("No CUDA GPUs are available")))
    reason = why_not_device(asked) or ""
    assert reason.startswith(
        "an NVIDIA driver (535.183.01) is here, and PyTorch sees no GPU: No CUDA GPUs are available. "
    )


def test_a_container_without_its_host_s_gpus_is_refused_where_they_are_meant(machine: Callable[..., None]) -> None:
    machine(module="580.65.06")
    assert why_not_device() is None and NO_DRIVER in (why_not_device("cuda") or "")
    machine(module="580.65.06", build="13.0")
    assert "an NVIDIA driver (580.65.06) is here" in (why_not_device() or "")


def test_the_cpu_is_used_where_it_is_asked_for(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine("570.86.15")
    assert why_not_device("cpu") is None
    monkeypatch.setenv("MARSRL_DEVICE", "cpu")
    assert why_not_device() is None and why_not_device("cuda") is None
    monkeypatch.setenv("MARSRL_DEVICE", "cuda")  # a word to the install
    assert CPU_BUILD in (why_not_device() or "")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert why_not_device() is None
        assert "CUDA_VISIBLE_DEVICES hides every GPU" in (why_not_device("cuda") or "")


def test_a_gpu_that_is_seen_is_used(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine("580.65.06", build="13.0", seen=True)
    assert why_not_device() is None and why_not_device("cuda") is None
    monkeypatch.setenv("MARSRL_DEVICE", "cpu")  # allows the CPU, and does not forbid a GPU
    assert why_not_device() is None and why_not_device("cuda") is None
    assert "hide it, CUDA_VISIBLE_DEVICES=-1" in (why_not_device("cpu") or "")


def test_a_host_without_the_gpus_that_it_is_to_lend_does_not_join(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine("580.65.06")
    words = ["join", "127.0.0.1:1", "--wait", "0"]
    for gpus in ([], ["--gpus", "0"]):
        assert main([*words, *gpus]) == 2
        assert "marsrl join: an NVIDIA driver (580.65.06) is here" in (error := capsys.readouterr().err)
        assert CPU_BUILD in error
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main([*words, "--engines", "1"]) == 1  # for engines on CPUs
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "no cluster at 127.0.0.1:1" in capsys.readouterr().err
