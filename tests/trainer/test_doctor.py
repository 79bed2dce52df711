"""`marsrl doctor` on a GPU node, with PyTorch told of eight H100s; and what it says of a config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from marsrl.rollout.tools.python import launcher as launcher_module
from marsrl.rollout.tools.python.launcher import Launcher
from marsrl.trainer.checks import device, doctor
from marsrl.trainer.checks.doctor import (
    config_findings,
    free_gpus,
    gpu_findings,
    ray_findings,
    room_for_weights,
    sandbox_findings,
)
from marsrl.trainer.commands.cli import main
from marsrl.trainer.config import RunConfig


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPUs 0 and 7 do not reach each other."""
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release Build\nGCC version: 12\n"
    (tmp_path / "version").write_text(driver)
    monkeypatch.setattr(device, "KERNEL_MODULE", tmp_path / "version")
    cuda = torch.cuda
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 8)
    monkeypatch.setattr(cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 7})
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 28, 9))


def settings(**sections: object) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_a_gpu_node_says_its_versions_and_who_reaches_whom(eight_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, cuda, nccl, peers = gpu_findings()
    assert driver.detail == "570.86.15"
    assert cuda.detail == "13.0 of torch; compute capability 9.0, 80 GiB each" and nccl.detail == "2.28.9"
    assert not peers.is_used and peers.detail.startswith("no direct way between 0-7: NCCL goes through host memory")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert list(gpu_findings())[-1].detail == "all 8 GPUs reach each other's memory"
    monkeypatch.setattr(device, "KERNEL_MODULE", Path("/none"))
    monkeypatch.setenv("PATH", "/none")
    assert not next(gpu_findings()).is_used


def test_without_gpus_there_is_nothing_to_say_of_them() -> None:
    if not torch.cuda.is_available():
        assert not list(gpu_findings())


def test_the_sandbox_is_said_with_what_it_lacks_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = [Launcher("plain", (), False)]
    monkeypatch.setattr(launcher_module, "launchers", lambda config: launchers)
    monkeypatch.setattr(launcher_module, "look", lambda launcher, config: ["a network namespace of its own"])
    python, cgroup = sandbox_findings(settings())
    assert not python.is_used
    assert python.detail.startswith("sandbox by plain, without a network namespace of its own; what helps: ")
    assert cgroup.is_used or "cgroup" in cgroup.detail
    monkeypatch.setattr(launcher_module, "launchers", lambda config: [])
    [python] = sandbox_findings(settings())
    assert not python.is_used and "no interpreter can be started" in python.detail


def test_room_for_weights_in_files_is_counted_twice_for_every_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = {"free": 100 << 30}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=128 << 30, **free))
    large = {"main": {"model": "Qwen3-30B-A3B", "dtype": "bfloat16"}}
    found = room_for_weights(settings(policies=large, sync={"directory": str(tmp_path)}))
    assert not found.is_used and found.name == str(tmp_path)
    assert found.detail.startswith(
        "100.0 of 128.0 GiB free; weights in files (sync.backend=shm) need 113.7 GiB, two versions"
    )
    free["free"] = 120 << 30
    assert room_for_weights(settings(policies=large, sync={"directory": str(tmp_path)})).is_used
    found = room_for_weights(settings())
    assert found.is_used and "small policies of a warm start" in found.detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = room_for_weights(settings(policies=large))
    assert found.is_used and "sync.backend=nccl writes no weights there" in found.detail


def test_the_token_of_ray_is_found_or_said_where_to_copy_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    token, cluster = ray_findings(settings(rollout={"ray_address": "here"}))
    assert not token.is_used and "copy ~/.ray/auth_token of the host that started the cluster" in token.detail
    assert cluster.is_used and "other hosts run `marsrl join`" in cluster.detail
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 64)
    token, cluster = ray_findings(settings(rollout={"ray_address": "127.0.0.1:1", "ray_timeout_s": 2}))
    assert token.is_used and not cluster.is_used and "nothing answers there" in cluster.detail


def test_what_a_config_cannot_do_here_is_said_with_the_nearest_that_can(eight_gpus: None) -> None:
    """As preflight does it: the doctor has no rules of its own."""
    config = settings(rollout={"engines": 6, "vllm": {"gpu_memory_utilization": 0.5}})
    assert free_gpus(config) == 2 and free_gpus(settings(rollout={"engines": 6, "ray_address": "here"})) == 8
    (refused,) = config_findings(config, 1, 4)
    assert refused[:3] == ("config", "torchrun --nnodes 1 --nproc-per-node 4", False)
    assert "refused: rollout.engines=6 with 1 policy(s) needs 6 GPU(s) without a trainer rank" in refused.detail
    assert "set rollout.engines=4" in refused.detail


def test_a_config_that_runs_here_is_placed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "rollout.engine=local", "rollout.engines=2"]) == 0
    shown = capsys.readouterr().out
    assert "+ torchrun --nnodes 1 --nproc-per-node 1: passes every check of a dry run" in shown
    assert "CPU: rank 0; CPU: main engines 0-1" in shown and "weights: sync.backend=shm" in shown
    assert main(["doctor", "rollout.engine=local", "sync.backend=nccl"]) == 1
    assert "refused: sync.backend=nccl needs CUDA" in capsys.readouterr().out
    assert main(["doctor", "--nnodes", "0"]) == 2
