"""A GPU that PyTorch does not see is refused with the reason, and the CPU is used where it is asked for."""

from __future__ import annotations

import os
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
HERE = "an NVIDIA driver ("
HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
TO_HIDE = "hide it, CUDA_VISIBLE_DEVICES=-1"
PARTS = {CPU_BUILD, NO_DRIVER, OLD, HERE, HIDDEN, TO_HIDE}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes this one a machine with that driver and that PyTorch.

    driver: as nvidia-smi says. module: as the kernel says, also to containers without its GPUs. build: torch.version.cuda, and
    whether PyTorch sees a GPU.
    """

    def make(driver: str | None, module: str | None = None, build: str | None = None) -> None:
        os.environ["PATH"] = str(tmp_path / "bin")
        monkeypatch.setattr(device, "KERNEL_MODULE", tmp_path / "version")
        if driver is not None:
            (tmp_path / "bin").mkdir(exist_ok=True)
            (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
            (tmp_path / "bin/nvidia-smi").chmod(0o755)
        if module is not None:
            kernel = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {module}  Release\n"
            (tmp_path / "version").write_text(kernel)
        monkeypatch.setattr(torch.version, "cuda", build and build.split()[0])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "sees" in (build or ""))

    for name in ("MARSRL_DEVICE", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    return make


NEW, OUTDATED = "580.65.06", "570.86.15"


@pytest.mark.parametrize(
    ("driver", "module", "build", "shown", "asked", "parts"),
    [
        (None, None, None, "", "cpu", None),
        (None, None, None, "", "cuda", {CPU_BUILD, NO_DRIVER}),
        (None, None, "13.0", "", "cuda", {NO_DRIVER}),  # on a login node
        (NEW, None, None, "", "auto", {HERE, CPU_BUILD}),
        (OUTDATED, None, "13.0", "", "auto", {HERE, OLD}),
        (OUTDATED, None, None, "", "cuda", {HERE, OLD, CPU_BUILD}),  # what is to be done before and after the install
        ("535.183.01", None, "12.6", "", "auto", {HERE}),  # new enough: PyTorch itself says why
        (None, NEW, None, "", "auto", None),  # a container without the GPUs of its host
        (None, NEW, "13.0", "", "auto", {HERE}),
        (OUTDATED, None, None, "MARSRL_DEVICE=cpu", "auto", None),
        (OUTDATED, None, None, "MARSRL_DEVICE=cuda", "auto", {HERE, OLD, CPU_BUILD}),  # a word to the install
        (OUTDATED, None, None, "CUDA_VISIBLE_DEVICES=-1", "auto", None),
        (OUTDATED, None, None, "CUDA_VISIBLE_DEVICES=-1", "cuda", {HERE, OLD, CPU_BUILD, HIDDEN}),
        (NEW, None, "13.0 and sees", "", "auto", None),
        (NEW, None, "13.0 and sees", "MARSRL_DEVICE=cpu", "cpu", {TO_HIDE}),
    ],
)
def test_a_device_that_is_not_to_be_had_is_refused_with_all_its_reasons(
    driver: str | None,
    module: str | None,
    build: str | None,
    shown: str,
    asked: Device,
    parts: set[str] | None,
    machine: Callable[..., None],
) -> None:
    machine(driver, module, build)
    os.environ.update(word.split("=") for word in shown.split())  # type: ignore[arg-type]
    reason = why_not_device(asked)
    assert (reason and {part for part in PARTS if part in reason}) == parts
    assert reason is None or TO_HIDE in reason or "set MARSRL_DEVICE=cpu or run.device=cpu" in reason


def test_a_host_without_the_gpus_that_it_is_to_lend_does_not_join(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine(NEW)
    words = ["join", "127.0.0.1:1", "--wait", "0"]
    for gpus in ([], ["--gpus", "0"]):
        assert main([*words, *gpus]) == 2
        assert "marsrl join: an NVIDIA driver (580.65.06) is here" in (error := capsys.readouterr().err)
        assert CPU_BUILD in error
    assert main([*words, "--engines", "1"]) == 1  # for engines on CPUs
    assert "no cluster at 127.0.0.1:1" in capsys.readouterr().err
