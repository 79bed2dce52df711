"""Dockerfile, compose.yaml, .dockerignore, the locks and the docs agree. No image is built."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import yaml
from documented_commands import run_by
from documents import ROOT, commands

LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
ARGUMENTS = {line.split()[1].partition("=")[0] for line in LINES if line.startswith("ARG ")}


def is_ignored(path: str) -> bool:
    """Return True if .dockerignore excludes the path."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    parents = [path, *map(str, Path(path).parents)]
    return any(fnmatch(each, pattern.removeprefix("**/")) for each in parents for pattern in patterns)


def test_the_image_gets_the_locks_and_the_code() -> None:
    copied = [word for line in LINES if line.startswith("COPY ") for word in line.split()[2:-1]]
    assert {"constraints/cpu.txt", "constraints/cuda.txt", "."} == set(copied)
    needed = (
        "constraints/cpu.txt",
        "setup.py",
        "README.md",
        "csrc/cpu/draw.cpp",
        "trainer/main.py",
        "configs/cpu_default.yaml",
    )
    assert not [path for path in needed if is_ignored(path)]
    assert all(map(is_ignored, (".git/HEAD", ".venv/bin/python", "kernels/_lib/marsrl_cpu.so", "runs/one/config.yaml")))


def test_docker_commands_use_existing_build_arguments_and_tags() -> None:
    given = [each.text for each in commands() if each.text.startswith("docker ")]
    texts = [*given, *(line for line in LINES if line.startswith("#   docker "))]
    assert {name for text in texts for name in re.findall(r"--build-arg (\w+)=", text)} <= ARGUMENTS
    built = {
        word for text in given if text.startswith("docker build") for word in shlex.split(text) if "marsrl:" in word
    }
    run = {word for text in given if text.startswith("docker run") for word in shlex.split(text) if "marsrl:" in word}
    assert built == {"marsrl:cpu", "marsrl:cuda"} == run


def test_compose_builds_the_image_for_gpus() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["marsrl"]
    assert (
        service["build"]["args"] == {"DEVICE": "cuda", "BASE": "ubuntu:24.04"}
        and service["build"]["args"].keys() <= ARGUMENTS
    )
    assert service["ipc"] == "host" and "./runs:/opt/marsrl/runs" in service["volumes"]
    assert "WORKDIR /opt/marsrl" in LINES and "USER marsrl" in LINES


def test_every_docker_command_of_the_documents_is_checked() -> None:
    """Other tests run the commands that these containers start: the doctor and the default run."""
    found = run_by("test_every_docker_command_of_the_documents_is_checked")
    assert found and not [
        each for each in found if not re.fullmatch(r"docker build .*|docker run .* marsrl:\w+( .*)?", each)
    ]
    started = {each.partition(" marsrl:")[2].partition(" ")[2] for each in found if each.startswith("docker run")}
    assert started == {"", "torchrun trainer/main.py"}
