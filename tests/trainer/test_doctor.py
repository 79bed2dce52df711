"""`marsrl doctor` reports on this machine and a config. Ranks, engines and weights are placed by settings alone. If PyTorch does
not see a GPU, the error says why.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marsrl.commands.cli import main
from marsrl.commands.doctor import gpu_findings, ray_findings, room_for_weights, sandbox_findings
from marsrl.rollout.engines.refusals import TrainerHost
from marsrl.rollout.tools.python import launcher
from marsrl.trainer.checks import device
from marsrl.trainer.checks.device import Device, why_not_device
from marsrl.trainer.checks.placement import placement_lines, with_backend
from marsrl.trainer.config import RunConfig
from marsrl.trainer.machine import device_name, native_dtype


def settings(**sections: object) -> RunConfig:
    return RunConfig.model_validate(sections)


@pytest.mark.gpu
def test_a_gpu_node_reports_its_versions_and_peer_access() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    driver, cuda, nccl, peers = gpu_findings()
    assert driver.is_used and re.fullmatch(r"\d+(\.\d+)+", driver.detail)
    assert cuda.detail.startswith(f"{torch.version.cuda} of torch; compute capability ")
    assert nccl.detail == ".".join(map(str, torch.cuda.nccl.version()))
    assert peers.is_used != ("NCCL goes through host memory" in peers.detail)


def test_doctor_names_the_sandbox_or_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    (python,) = sandbox_findings(settings())
    assert python.detail == "sandbox by bubblewrap" if python.is_used else "what helps: " in python.detail
    monkeypatch.setattr(launcher, "_bwrap", lambda config, is_root: ("sh", "-c", "echo no namespaces; exit 1", "sh"))
    (python,) = sandbox_findings(settings())
    assert not python.is_used and re.search(
        "cannot create a complete sandbox here .no namespaces.; what helps: ", python.detail
    )


def test_disk_for_weight_files_counts_twice_per_policy(tmp_path: Path) -> None:
    large = {"main": {"model": "Qwen3-30B-A3B", "dtype": "bfloat16"}}
    shm = {"directory": str(tmp_path), "backend": "shm"}
    free = shutil.disk_usage(tmp_path).free
    finding = room_for_weights(settings(policies=large, sync=shm))
    assert finding.name == str(tmp_path) and finding.is_used == (free > 2 * 2 * 30_532_122_624)
    assert "weights in files (sync.backend=shm) need 113.7 GiB, two versions" in finding.detail
    finding = room_for_weights(settings(sync=shm))
    assert finding.is_used and "small policies of a warm start" in finding.detail
    finding = room_for_weights(settings(policies=large, sync={"backend": "nccl", "cpu_twin": True}))
    assert finding.is_used and "sync.backend=nccl writes no weights there" in finding.detail


def test_a_cluster_is_started_by_the_run_or_has_to_answer() -> None:
    (cluster,) = ray_findings(settings(rollout={"ray_address": "here"}))
    assert cluster.is_used and "other hosts join by `ray start`" in cluster.detail
    (cluster,) = ray_findings(settings(rollout={"ray_address": "127.0.0.1:1", "ray_timeout_s": 2}))
    assert not cluster.is_used and "nothing answers there" in cluster.detail


def test_a_config_that_runs_here_is_placed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "rollout.engine=local", "rollout.engines=2"]) == 0
    shown = capsys.readouterr().out
    assert "+ torchrun --nnodes 1 --nproc-per-node 1: passes every check of a dry run" in shown
    dtype, why = native_dtype()
    assert f"+ dtype: policies.<name>.dtype=auto: {dtype} ({why})" in shown
    assert "ranks: 1, on CPUs" in shown and "weights: sync.backend=shm" in shown
    assert main(["doctor", "rollout.engine=local", "rollout.engines=2", "sync.backend=nccl"]) == 1
    assert "refused: sync.backend=nccl needs CUDA" in capsys.readouterr().out
    assert main(["doctor", "--nnodes", "0"]) == 2


@pytest.mark.parametrize(
    ("has_gpu", "flags", "dtype"),
    [
        (False, "avx2 avx512f avx512_bf16", "bfloat16"),
        (False, "amx_tile amx_bf16", "bfloat16"),
        (False, "avx2 avx512f avx512_vnni", "float32"),
        (True, "avx2", "bfloat16"),
    ],
)
def test_auto_is_the_dtype_that_hardware_computes_with(
    has_gpu: bool, flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = tmp_path / "cpuinfo"
    cpus.write_text(f"processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu {flags} x2apic\n\n" * 2)
    monkeypatch.setattr("marsrl.trainer.machine.CPUS", cpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert native_dtype()[0] == dtype
    if not has_gpu:
        assert device_name() == "2 CPU cores, A CPU"


NODE = TrainerHost(num_gpus=8, num_ranks=4, has_others=False)


def config_of(rollout: dict[str, Any], sync: dict[str, Any] | None = None, **others: Any) -> RunConfig:
    policies = {"policies": {"main": {"model": "/m", "dtype": "bfloat16"}}, "loss": {"correction": "tis"}}
    return RunConfig.model_validate({"rollout": rollout, "sync": sync or {}, **policies, **others})


@pytest.mark.parametrize(
    ("rollout", "sync", "on_gpus", "backend"),
    [
        ({}, {}, True, "nccl"),  # NCCL is used on one host too
        ({"ray_address": "here"}, {}, True, "nccl"),
        ({"placement": "colocated"}, {}, True, "ipc"),
        ({"placement": "local"}, {}, True, "shm"),
        ({}, {"directory": "/shared"}, True, "shm"),
        ({}, {"backend": "shm"}, True, "shm"),
        ({"placement": "colocated"}, {}, False, "shm"),
        ({}, {"cpu_twin": True}, False, "nccl"),
        ({"placement": "colocated"}, {"cpu_twin": True}, False, "ipc"),
        ({"vllm": {"quantization": "fp8"}}, {}, True, "nccl"),  # weights are rounded to FP8 after the transfer
        ({"vllm": {"quantization": "fp8"}, "placement": "colocated"}, {}, True, "ipc"),
    ],
)
def test_the_sync_backend_follows_from_the_placement(
    rollout: dict[str, Any], sync: dict[str, Any], on_gpus: bool, backend: str
) -> None:
    decided = with_backend(config_of(rollout, sync), on_gpus=on_gpus)
    assert decided.sync.backend == backend
    assert with_backend(decided, on_gpus=not on_gpus) == decided
    RunConfig.model_validate(decided.model_dump())  # the decided config can be read again, as config.yaml is


WIDE = {"engines": 11, "ray_address": "here", "vllm": {"tensor_parallel": 2}}
JUDGE = {"main": {}, "judge": {"frozen": True, "model": "/m", "engines": 1, "vllm": {"tensor_parallel": 2}}}


@pytest.mark.parametrize(
    ("host", "world_size", "rollout", "others", "lines"),
    [
        (NODE, 4, {"engines": 3}, {}, ["ranks: 4, on GPUs 0-3", "engines of main: 3, 3 on GPUs 4-6 of this host"]),
        (NODE, 4, {"engines": 2}, {"policies": JUDGE},
         ["ranks: 4, on GPUs 0-3", "engines of main: 2, 2 on GPUs 4-5 of this host",
          "engines of judge: 1 of 2 GPUs, 1 on GPUs 6-7 of this host"]),
        (NODE, 4, {"engines": 4, "placement": "colocated"}, {},
         ["ranks: 4, on GPUs 0-3", "engines of main: 4, one on each of these GPUs"]),
        (TrainerHost(1, 1, False), 1, {"placement": "local"}, {},
         ["ranks: 1, on GPU 0", "engines of main: 1, in this process"]),
        # An evaluation has no rank.
        (TrainerHost(8, 0, False), 1, {"engines": 2}, {}, ["engines of main: 2, 2 on GPUs 0-1 of this host"]),
        (TrainerHost(8, 6, True), 18, WIDE, {},
         ["ranks: 18, 6 a host, on GPUs 0-5",
          "engines of main: 11 of 2 GPUs, 1 on GPUs 6-7 of this host, 10 on hosts of the Ray cluster"]),
        (TrainerHost(8, 8, True), 8, {"engines": 8, "ray_address": "head:6379"}, {},
         ["ranks: 8, on GPUs 0-7", "engines of main: 8, 8 on hosts of the Ray cluster"]),
    ],
)  # fmt: skip
def test_ranks_get_the_first_gpus_and_engines_the_rest(
    host: TrainerHost, world_size: int, rollout: dict[str, Any], others: dict[str, Any], lines: list[str]
) -> None:
    config = with_backend(config_of(rollout, **others), on_gpus=host.num_gpus > 0)
    *found, of_weights = placement_lines(config, host, world_size)
    assert found == lines and of_weights.startswith(f"weights: sync.backend={config.sync.backend}, ")


WITHOUT_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="about machines on which PyTorch sees no GPU")
CPU_BUILD = "is a CPU build (`MARSRL_DEVICE=cuda make install`"
NO_DRIVER = "no NVIDIA driver is found"
OLD = "the NVIDIA driver is 570.86.15, but CUDA 13.0 needs 580 or newer"
HERE = "an NVIDIA driver ("
HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
TO_HIDE = "hide it with CUDA_VISIBLE_DEVICES=-1"
PARTS = {CPU_BUILD, NO_DRIVER, OLD, HERE, HIDDEN, TO_HIDE}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that makes this machine look like one with the given driver and PyTorch.

    driver: version from nvidia-smi. module: version that the kernel reports, also in containers without GPUs. build:
    torch.version.cuda, followed by "sees" if PyTorch sees a GPU.
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


@WITHOUT_CUDA
@pytest.mark.parametrize(
    ("here", "shown", "asked", "parts"),
    [  # the first column has the arguments of `machine`: driver, module, build
        ((None,), "", "cpu", None),
        ((None,), "", "cuda", {CPU_BUILD, NO_DRIVER}),
        ((None, None, "13.0"), "", "cuda", {NO_DRIVER}),  # on a login node
        ((NEW,), "", "auto", {HERE, CPU_BUILD}),
        ((OUTDATED, None, "13.0"), "", "auto", {HERE, OLD}),
        ((OUTDATED,), "", "cuda", {HERE, OLD, CPU_BUILD}),  # both the driver and PyTorch must be replaced
        # The driver is new enough, so PyTorch itself gives the reason.
        (("535.183.01", None, "12.6"), "", "auto", {HERE}),
        ((None, NEW), "", "auto", None),  # a container without its host's GPUs
        ((None, NEW, "13.0"), "", "auto", {HERE}),
        ((OUTDATED,), "MARSRL_DEVICE=cpu", "auto", None),
        # This setting concerns only the installation.
        ((OUTDATED,), "MARSRL_DEVICE=cuda", "auto", {HERE, OLD, CPU_BUILD}),
        ((OUTDATED,), "CUDA_VISIBLE_DEVICES=-1", "auto", None),
        ((OUTDATED,), "CUDA_VISIBLE_DEVICES=-1", "cuda", {HERE, OLD, CPU_BUILD, HIDDEN}),
        ((NEW, None, "13.0 and sees"), "", "auto", None),
        ((NEW, None, "13.0 and sees"), "MARSRL_DEVICE=cpu", "cpu", {TO_HIDE}),
    ],
)
def test_an_unavailable_device_is_refused_with_all_reasons(
    here: tuple[str | None, ...], shown: str, asked: Device, parts: set[str] | None, machine: Callable[..., None]
) -> None:
    machine(*here)
    os.environ.update(word.split("=") for word in shown.split())  # type: ignore[arg-type]
    reason = why_not_device(asked)
    assert (reason and {part for part in PARTS if part in reason}) == parts
    assert reason is None or TO_HIDE in reason or "set MARSRL_DEVICE=cpu or run.device=cpu" in reason
