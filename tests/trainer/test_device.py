"""A GPU that PyTorch does not see is refused with the reason, and the CPU is used where it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    driver: as nvidia-smi says. module: as the kernel says, also to containers without its GPUs. build: torch.version.cuda.
    """

    def make(
        driver: str | None = None, module: str | None = None, build: str | None = None, seen: bool = False
    ) -> None:
        os.environ["PATH"] = str(tmp_path / "bin")
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
        os.environ.pop(name, None)
    return make


LOGIN_NODE = {"build": "13.0"}
NEW, OUTDATED = {"driver": "580.65.06"}, {"driver": "570.86.15"}
CONTAINER = {"module": "580.65.06"}  # without the GPUs of its host
SEES = {"driver": "580.65.06", "build": "13.0", "seen": True}
ON_CPU, ON_CUDA = {"MARSRL_DEVICE": "cpu"}, {"MARSRL_DEVICE": "cuda"}  # the second is a word to the install
NO_GPU_SHOWN = {"CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(
    ("of", "variables", "asked", "parts"),
    [
        ({}, {}, "cpu", None),
        ({}, {}, "cuda", {CPU_BUILD, NO_DRIVER}),
        (LOGIN_NODE, {}, "cuda", {NO_DRIVER}),
        (NEW, {}, "auto", {HERE, CPU_BUILD}),
        (OUTDATED | LOGIN_NODE, {}, "auto", {HERE, OLD}),
        (OUTDATED, {}, "cuda", {HERE, OLD, CPU_BUILD}),  # what is to be done before and after the install
        ({"driver": "535.183.01", "build": "12.6"}, {}, "auto", {HERE}),  # new enough: PyTorch itself says why
        (CONTAINER, {}, "auto", None),
        (CONTAINER | LOGIN_NODE, {}, "auto", {HERE}),
        (OUTDATED, ON_CPU, "auto", None),
        (OUTDATED, ON_CUDA, "auto", {HERE, OLD, CPU_BUILD}),
        (OUTDATED, NO_GPU_SHOWN, "auto", None),
        (OUTDATED, NO_GPU_SHOWN, "cuda", {HERE, OLD, CPU_BUILD, HIDDEN}),
        (SEES, {}, "auto", None),
        (SEES, ON_CPU, "cpu", {TO_HIDE}),
    ],
)
def test_a_device_that_is_not_to_be_had_is_refused_with_all_its_reasons(
    of: dict[str, Any],
    variables: dict[str, str],
    asked: Device,
    parts: set[str] | None,
    machine: Callable[..., None],
) -> None:
    machine(**of)
    for name, value in variables.items():
        os.environ[name] = value
    reason = why_not_device(asked)
    assert (reason is None) == (parts is None)
    assert reason is None or {part for part in PARTS if part in reason} == parts
    assert reason is None or TO_HIDE in reason or "set MARSRL_DEVICE=cpu or run.device=cpu" in reason


def test_a_host_without_the_gpus_that_it_is_to_lend_does_not_join(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine("580.65.06")
    words = ["join", "127.0.0.1:1", "--wait", "0"]
    for gpus in ([], ["--gpus", "0"]):
        assert main([*words, *gpus]) == 2
        assert "marsrl join: an NVIDIA driver (580.65.06) is here" in (error := capsys.readouterr().err)
        assert CPU_BUILD in error
    assert main([*words, "--engines", "1"]) == 1  # for engines on CPUs
    assert "no cluster at 127.0.0.1:1" in capsys.readouterr().err
